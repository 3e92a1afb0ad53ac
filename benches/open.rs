//! What opening and binding a model of 56 GiB costs, whose two files are holes but for the headers.
//!
//! Prints the milliseconds of each part, medians of rounds, and what the process grew by; nothing
//! here passes or fails. `VBAR_BENCH_DEVICE=sim` takes the simulated device where a real one is
//! present.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use vbar::Runtime;
use vbar::driver::select::{Opened, Selection, open};
use vbar::error::Result;
use vbar::host::model_files::Model;
use vbar::options::RuntimeOptions;
use vbar::units::GIB;

const SHARDS: u64 = 2;
const SHARD_BYTES: u64 = 28 * GIB;
const TENSORS: u64 = 320;
const ROUNDS: usize = 9;

fn main() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    write_sparse(folder.path()).expect("room for sparse files");
    let sim = std::env::var("VBAR_BENCH_DEVICE").is_ok_and(|wanted| wanted == "sim");
    let selection = if sim { Selection::parse("sim")? } else { Selection::Auto };
    let Opened { driver, device, .. } = open(&selection)?;
    println!("driver: {}", driver.description());
    println!("{SHARDS} files of {} GiB, {TENSORS} tensors each", SHARD_BYTES / GIB);
    let (mut first, mut opened, mut bound) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let options = RuntimeOptions::default();
        let runtime = Runtime::open(driver.clone(), device, options)?;
        let grown = resident_bytes();
        for times in [&mut first, &mut bound] {
            let start = Instant::now();
            let model = Model::open(folder.path())?;
            let read = start.elapsed();
            let bar = runtime.bind_model(model)?;
            times.push(start.elapsed());
            opened.push(read);
            drop(bar);
        }
        println!("resident: {} KiB more", (resident_bytes() - grown) >> 10);
    }
    println!("read headers:                        {:8.3} ms", median(&mut opened));
    println!("first of a device, with its slots:   {:8.3} ms", median(&mut first));
    println!("next of the same device:             {:8.3} ms", median(&mut bound));
    Ok(())
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

fn resident_bytes() -> i64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.map_or(0, |pages: i64| pages * 4096)
}

fn write_sparse(folder: &Path) -> std::io::Result<()> {
    let mut places = Vec::new();
    for shard in 0..SHARDS {
        let name = format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1);
        let bytes = SHARD_BYTES / TENSORS / 2 * 2;
        let mut tensors = Vec::new();
        for number in 0..TENSORS {
            let tensor = format!("layers.{}.weight", shard * TENSORS + number);
            places.push(format!("\"{tensor}\":\"{name}\""));
            let (start, elements) = (number * bytes, bytes / 2);
            let end = start + bytes;
            tensors.push(format!(
                "\"{tensor}\":{{\"dtype\":\"BF16\",\"shape\":[{elements}],\
                 \"data_offsets\":[{start},{end}]}}"
            ));
        }
        let header = format!("{{{}}}", tensors.join(","));
        let mut file = std::fs::File::create(folder.join(&name))?;
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        file.set_len(8 + header.len() as u64 + TENSORS * bytes)?;
    }
    let index = format!("{{\"weight_map\":{{{}}}}}", places.join(","));
    std::fs::write(folder.join("model.safetensors.index.json"), index)
}
