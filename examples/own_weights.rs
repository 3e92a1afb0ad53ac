//! A weight that the program writes itself: written once, read until it is evicted, written again.
//!
//! `cargo run --example own_weights` runs on a GPU where there is one, else on the simulated device.

use vbar::driver::KernelCall;
use vbar::driver::select::{Selection, open};
use vbar::units::MIB;
use vbar::{AllocationFault, Runtime, RuntimeOptions};

fn main() -> vbar::Result<()> {
    let chosen = open(&Selection::Auto)?;
    let runtime = Runtime::open(chosen.driver, chosen.device, RuntimeOptions::default())?;
    let driver = &runtime.device().driver;
    driver.ctx_set_current(Some(runtime.device().context))?;
    driver.module_load()?;
    let stream = driver.stream_create()?;

    // Addresses for 64 GiB; memory comes when a weight is faulted.
    let vbar = runtime.create_bar(64 << 30)?;
    let weight = vbar.allocate(100 * MIB)?;
    for step in 1..=3 {
        let guard = match weight.fault(stream)? {
            AllocationFault::Resident(guard) => guard,
            AllocationFault::Refill(fill) => {
                println!("step {step}: the bytes must be written");
                let (target, bytes) = (fill.address(), fill.bytes());
                let call = KernelCall::Pattern { target, bytes, seed: 1, delay_nanos: 0 };
                driver.launch_kernel(call, stream)?;
                fill.commit(stream)?
            }
            AllocationFault::Offloaded(reason) => {
                println!("step {step}: does not fit ({reason}): use the host's copy");
                continue;
            }
            AllocationFault::Busy => unreachable!("nobody else fills"),
        };
        println!("step {step}: {} bytes at {}", guard.bytes(), guard.address());
        // Launch work that reads the weight on `stream` here. Dropping the guard lets the page go
        // once that work is done, and not before.
        drop(guard);
        if step == 2 {
            println!("evicted: {:?}", vbar.free_memory(u64::MAX)?);
            vbar.prioritise()?;
        }
    }
    driver.stream_synchronize(stream)?;
    Ok(driver.stream_destroy(stream)?)
}
