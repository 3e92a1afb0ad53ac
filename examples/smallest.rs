//! The smallest whole program: every weight of a model, one after the other, in 4 GiB.

use std::path::Path;

use vbar::driver::select::{Selection, open};
use vbar::units::Stream;
use vbar::{Fault, Runtime, RuntimeOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: smallest MODEL")?;
    // A GPU where there is one, else the simulated device.
    let chosen = open(&Selection::Auto)?;
    let options = RuntimeOptions { budget_bytes: Some(4 << 30), ..RuntimeOptions::default() };
    let runtime = Runtime::open(chosen.driver, chosen.device, options)?;

    // Every tensor gets an address that never changes. Nothing is in device memory yet.
    let model = runtime.open_model(Path::new(&path))?;
    let stream = Stream::DEFAULT;
    for tensor in 0..model.model().tensors().len() {
        match model.fault(tensor, stream)? {
            // Resident, pinned, and valid for work on `stream`: launch it here. When the guard is
            // dropped the bytes stay until that work is done, and not longer than they must.
            Fault::Resident(weight) | Fault::HostMapped(weight) => {
                println!("{} bytes at {}", weight.bytes(), weight.address());
            }
            // Not resident, and the reason says why: use the host's copy.
            Fault::Offloaded(refused) => println!("offloaded: {refused}"),
        }
    }
    Ok(())
}
