//! Has loom stand in for the standard library's atomics and locks (`src/sync/mod.rs`).

fn main() {
    println!("cargo::rustc-cfg=vbar_loom");
    println!("cargo::rerun-if-changed=build.rs");
}
