//! Prints the C header that belongs to `src/ffi`: `make header` writes it to `include/vbar.h`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = env!("CARGO_MANIFEST_DIR");
    let config = cbindgen::Config::from_root_or_default(root);
    cbindgen::Builder::new()
        .with_config(config)
        .with_src(format!("{root}/src/ffi/mod.rs"))
        .generate()?
        .write(std::io::stdout());
    Ok(())
}
