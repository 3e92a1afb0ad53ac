//! A target by the name of its binary.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vbar_fuzz::run(env!("CARGO_BIN_NAME"), input));
