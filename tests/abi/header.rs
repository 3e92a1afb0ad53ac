//! Writes the C headers that belong to `src/ffi`: `make header`. `tests/abi.rs` compares them.

use std::error::Error;
use std::path::Path;

mod made;

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for header in made::HEADERS {
        std::fs::write(root.join("include").join(header.name), made::make(root, header)?)?;
    }
    Ok(())
}
