//! What is told beside the name of a failure: the numbers, and what to do about it.

use vbar::driver::DriverCode;
use vbar::units::{DeviceOrdinal, PageSize};
use vbar::{ErrorCode, Runtime, RuntimeOptions};

use crate::forked::in_child;
use crate::program::{output, text, vbar, written_model};
use crate::world::{DEVICE, P, World, budget_options};

#[track_caller]
fn check(error: &vbar::Error, code: ErrorCode, words: &[&str]) {
    assert_eq!(error.code(), code, "{error}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "'{word}' is not in: {text}");
    }
}

#[test]
fn a_lost_device_says_what_is_left_to_do() {
    let world = World::budget(4);
    let vbar = world.vbar(2);
    world.sim.lose_device(DEVICE, DriverCode::LAUNCH_FAILED);
    vbar.fault(0..P, world.stream).map(drop).unwrap_err();
    let error = vbar.fault(0..P, world.stream).map(drop).unwrap_err();
    let words = ["CUDA_ERROR_LAUNCH_FAILED (719)", "end the process and start anew"];
    check(&error, ErrorCode::DeviceLost, &words);
}

#[test]
fn pins_that_leak_are_told_with_their_page() {
    let world = World::budget(1);
    let vbar = world.vbar(1);
    let mut held = Vec::new();
    let error = loop {
        match vbar.fault(0..P, world.stream) {
            Ok(fault) => held.push(fault),
            Err(error) => break error,
        }
    };
    assert_eq!(held.len(), 65_535);
    let page = format!("page 0 of VBAR {}", vbar.number());
    check(&error, ErrorCode::TooManyPins, &[&page, "65535", "give guards back"]);
}

#[test]
fn a_device_that_is_open_otherwise_is_told_with_both_ways() {
    let world = World::budget(4);
    let page_size = PageSize::new(2 * P).unwrap();
    let options = RuntimeOptions { page_size, ..budget_options(4) };
    let error = Runtime::open(world.sim.driver(), DEVICE, options).err().unwrap();
    let (open, asked) = (format!("pages of {P} bytes"), format!("{} bytes in", 2 * P));
    check(&error, ErrorCode::AlreadyOpen, &["device 0", &open, &asked, "close it first"]);
    let none = Runtime::open(world.sim.driver(), DeviceOrdinal(7), budget_options(4));
    check(&none.err().unwrap(), ErrorCode::DeviceNotRegistered, &["device 7", "the driver has 1"]);
}

#[test]
fn the_child_of_a_fork_is_told_that_it_is_one() {
    let world = World::budget(4);
    let vbar = world.vbar(1);
    assert!(in_child(|| {
        let error = vbar.fault(0..P, world.stream).map(drop).unwrap_err();
        let text = error.to_string();
        error.code() == ErrorCode::ProcessEnding
            && text.contains("child of a fork")
            && text.contains("spawn or exec")
    }));
}

/// A file of these bytes, which `vbar run` must refuse with these words.
#[track_caller]
fn check_file(bytes: &[u8], words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let said = output(&["run", text(&path), "--device", "sim"]);
    let errors = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(3), "{errors}");
    for word in [&["vbar: ", "broken.safetensors: "], words].concat() {
        assert!(errors.contains(word), "'{word}' is not in: {errors}");
    }
}

fn with_header(header: &str, data: usize) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], header.as_bytes(), &vec![0; data]].concat()
}

#[test]
fn a_file_that_is_no_model_is_told_with_what_is_wrong() {
    check_file(b"", &["0 bytes are too few"]);
    check_file(b"short", &["5 bytes are too few"]);
    check_file(&(1u64 << 60).to_le_bytes(), &["1152921504606846976 bytes", "the limit is"]);
    check_file(&with_header("{no", 0), &["the header is not valid", "line 1"]);
    let header = r#"{"w":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}"#;
    check_file(&with_header(header, 10), &["tensor 'w'", "ends at 64", "only 10 bytes"]);
    let header = r#"{"w":{"dtype":"F32","shape":[64],"data_offsets":[0,64]}}"#;
    check_file(&with_header(header, 64), &["64 bytes of data", "shape [64] of F32 has 256"]);
}

/// The program's errors name what was given and what can be, and the driver's library when it is
/// not there.
#[test]
fn a_wrong_argument_is_told_with_those_that_are_right() {
    let (_folder, path) = written_model(&[("w", 64)]);
    for (arguments, words) in [
        (&["--budget", "3x"][..], &["'3x'", "--budget", "K, M, G, T"][..]),
        (&["--page-size", "3M"], &["3M", "power of two, 4K to 1T"]),
        (&["--device", "gpu"], &["'gpu'", "auto, cuda[:index] or sim"]),
        (&["--device", "sim:colour=red"], &["'colour'", "capacity", "granularity"]),
        (&["--prefer", "tape"], &["'tape'", "auto, ram nor disk"]),
        (&["--scrub", "maybe"], &["'maybe'", "neither on nor off"]),
        (&["--passes", "0"], &["--passes", "no whole number from 1 to"]),
    ] {
        let said = output(&[&["run", text(&path)], arguments].concat());
        let errors = String::from_utf8_lossy(&said.stderr);
        assert_eq!(said.status.code(), Some(2), "{errors}");
        for word in words {
            assert!(errors.contains(word), "'{word}' is not in: {errors}");
        }
    }
    let said = vbar(&["run", text(&path)]).env("VBAR_DRIVER", "gpu").output().unwrap();
    let errors = String::from_utf8_lossy(&said.stderr);
    assert!(errors.contains("VBAR_DRIVER: 'gpu' is no device"), "{errors}");
}
