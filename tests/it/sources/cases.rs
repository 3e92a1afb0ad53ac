//! Sources, and what happens when one of them fails.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use vbar::ErrorCode;
use vbar::driver::DriverCode;
use vbar::driver::sim::Verb;

use super::*;

#[test]
fn every_byte_comes_with_and_without_threads() {
    for threads in [Threads::Off, Threads::On] {
        let rig = Rig::new(
            24,
            RuntimeOptions { threads: Some(threads), ..threaded() },
            Reader::Descriptor,
        );
        for keep in [Keep::No, Keep::Locked, Keep::Locked] {
            rig.fill(0..24, keep);
        }
        let sources = rig.sources();
        let cached = if threads == Threads::On { 24 * P } else { 0 };
        assert_eq!(sources.locked_cache_bytes, cached);
        assert_eq!(sources.page_cache_bytes + sources.disk_bytes, 72 * P - cached);
        assert_eq!(rig.cache_bytes(), cached / P * UNIT);
        rig.check_shut();
    }
}

#[test]
fn threads_come_and_go() {
    let rig = Rig::new(8, threaded(), Reader::Descriptor);
    for threads in [Threads::On, Threads::Off, Threads::On, Threads::On, Threads::Off] {
        rig.filler().set_threads(threads);
        rig.fill(0..8, Keep::No);
    }
    rig.check_shut();
}

#[test]
fn scenario_36_a_failed_read_is_that_reads_error() {
    for keep in [Keep::No, Keep::Locked] {
        let rig = Rig::new(4, threaded(), Reader::Watched);
        rig.watch.fails.store(true, Ordering::Relaxed);
        let error = rig.fill_failing(1..4, keep);
        assert_eq!(error.code(), ErrorCode::Io);
        let text = error.to_string();
        assert!(text.contains(&format!("at offset {}", OFFSET + P)), "{text}");
        assert!(text.contains("os error 5"), "{text}");
        rig.watch.fails.store(false, Ordering::Relaxed);
        rig.fill(0..4, keep);
        rig.check_shut();
    }
}

#[test]
fn scenario_36_memory_that_is_not_registered_is_copied_all_the_same() {
    let rig = Rig::new(8, threaded(), Reader::Descriptor);
    rig.sim.fail_always(Verb::MemHostRegister, DriverCode::OUT_OF_MEMORY);
    rig.fill(0..8, Keep::Locked);
    let calls = rig.sim.calls(Verb::MemHostRegister);
    rig.fill(0..8, Keep::Locked);
    assert_eq!(rig.cache_bytes(), 0);
    // Once refused it is not tried again; the ring's own growth has ended as well.
    assert!(rig.sim.calls(Verb::MemHostRegister) <= calls + 4, "it is tried again and again");
    rig.check_shut();
}

#[test]
fn scenario_36_a_refused_copy_is_the_devices_error() {
    for keep in [Keep::No, Keep::Locked] {
        let rig = Rig::new(4, threaded(), Reader::Descriptor);
        rig.sim.fail_nth(Verb::MemcpyHtodAsync, 2, DriverCode::INVALID_VALUE);
        let error = rig.fill_failing(0..4, keep);
        assert_eq!(error.code(), ErrorCode::Driver);
        assert!(error.to_string().contains("cuMemcpyHtoDAsync"), "{error}");
        rig.fill(0..4, keep);
        rig.check_shut();
    }
}

#[test]
fn a_file_that_changed_is_not_taken_from_memory_either() {
    let rig = Rig::new(4, threaded(), Reader::Descriptor);
    rig.fill(0..4, Keep::Locked);
    let file = OpenOptions::new().write(true).open(&rig.path).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    file.write_all_at(b"other", OFFSET).unwrap();
    for _ in 0..2 {
        assert_eq!(rig.fill_failing(0..4, Keep::Locked).code(), ErrorCode::FileChanged);
    }
    rig.check_shut();
}

#[test]
fn a_file_that_was_cut_short_or_replaced_is_an_error() {
    let rig = Rig::new(4, threaded(), Reader::Descriptor);
    rig.fill(0..1, Keep::No);
    let file = OpenOptions::new().write(true).open(&rig.path).unwrap();
    file.set_len(OFFSET + P + 5).unwrap();
    let error = rig.fill_failing(1..4, Keep::Locked);
    assert!(matches!(error.code(), ErrorCode::Io | ErrorCode::FileChanged), "{error}");
    std::fs::rename(&rig.path, rig.folder.path().join("elsewhere")).unwrap();
    assert_eq!(rig.fill_failing(0..1, Keep::No).code(), ErrorCode::FileChanged);
    rig.check_shut();
}

#[test]
fn direct_reads_give_the_same_bytes_or_are_not_made() {
    for threads in [Threads::Off, Threads::On] {
        let options = RuntimeOptions { prefer: Prefer::Disk, threads: Some(threads), ..threaded() };
        let rig = Rig::new(40, options, Reader::Descriptor);
        File::open(&rig.path).unwrap().sync_all().unwrap();
        for keep in [Keep::No, Keep::Locked] {
            rig.fill(0..40, keep);
        }
        let sources = rig.sources();
        assert_eq!(sources.page_cache_bytes + sources.disk_bytes, 80 * P);
        // Where the file system refuses they are ordinary reads.
        if rig.bound.file(0).direct().is_some() {
            assert_eq!((sources.direct_bytes, sources.page_cache_bytes), (80 * P, 0));
        } else {
            assert_eq!(sources.direct_bytes, 0);
        }
        rig.check_shut();
    }
}

#[test]
fn pages_of_many_pieces_and_files_of_odd_lengths_come_whole() {
    // Pages of 4 MiB, cut into pieces that several threads read.
    let page = 4 * MIB;
    let options =
        RuntimeOptions { page_size: vbar::units::PageSize::new(page).unwrap(), ..threaded() };
    for prefer in [Prefer::Ram, Prefer::Disk] {
        let options = RuntimeOptions { prefer, ..options.clone() };
        let sim = Sim::new(SimOptions::parse("capacity=64M,granularity=64K").unwrap());
        let context = sim.device_primary_ctx_retain(DEVICE).unwrap();
        sim.ctx_set_current(Some(context)).unwrap();
        let device = Arc::new(Device::new(sim.driver(), DEVICE, context, options));
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("model");
        let mut content = vec![0; (2 * page) as usize + 777];
        pattern(&mut content, 9);
        std::fs::write(&path, &content).unwrap();
        let file = Arc::new(ModelFile::open(&path).unwrap());
        // Two stretches with different places in file and memory, the second to the file's end.
        let (first, second) = (0..3 * MIB + 100, 3 * MIB + 512..2 * page);
        let mut binding = Binding::new();
        binding.bind(first.clone(), 0, 5, first.end).unwrap();
        let from = content.len() as u64 - (second.end - second.start);
        binding.bind(second.clone(), 0, from, second.end - second.start).unwrap();
        let bound = Arc::new(Bound::new(binding, vec![file]).unwrap());
        let base = sim.mem_address_reserve(2 * page, 0).unwrap();
        let frame = sim.mem_create(DEVICE, 2 * page).unwrap();
        sim.mem_map(base, 2 * page, frame).unwrap();
        sim.mem_set_access(base, 2 * page, &[DEVICE]).unwrap();
        let filler = Filler::new(device).unwrap();
        let job = |page_index: u32| {
            let target = u64::from(page_index) * page..u64::from(page_index + 1) * page;
            FillJob {
                bound: Arc::clone(&bound),
                base,
                target,
                bar: 3,
                page: page_index,
                keep: Keep::Locked,
                after: Vec::new(),
            }
        };
        for _ in 0..2 {
            filler.begin(vec![job(0), job(1)]).run(&mut |_, result| assert!(result.is_ok()));
            sim.stream_synchronize(filler.stream().0).unwrap();
            let found = sim.read_bytes(base, 2 * page as usize).unwrap();
            let range = |range: &Range<u64>| range.start as usize..range.end as usize;
            assert!(found[range(&first)] == content[5..5 + first.end as usize]);
            assert!(found[range(&second)] == content[from as usize..]);
        }
        drop(filler);
        assert_eq!((sim.violations(), sim.locked_bytes()), (vec![], 0));
    }
}
