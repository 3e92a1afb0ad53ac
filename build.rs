//! Link arguments that Cargo.toml cannot say.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Unloading the library while the driver may still call into it would end the process.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
