//! Link arguments that Cargo.toml cannot say: the library's name for loaders, and that it stays.

use std::fs;

const STATUS: &str = "src/ffi/status.rs";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={STATUS}");
    // A program that was linked to one ABI never loads another by mistake.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvbar.so.{}", abi_version());
    // Unloading the library while the driver may still call into it would end the process.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}

/// `VBAR_ABI_VERSION`, from the one place that has it.
fn abi_version() -> u32 {
    let text = fs::read_to_string(STATUS).unwrap_or_else(|error| panic!("{STATUS}: {error}"));
    let number = text
        .split_once("pub const VBAR_ABI_VERSION: u32 = ")
        .and_then(|(_, rest)| rest.split_once(';')?.0.parse().ok());
    number.unwrap_or_else(|| panic!("{STATUS} says no VBAR_ABI_VERSION"))
}
