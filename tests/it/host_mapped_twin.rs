//! Host frames as a program sees them, on any driver: what no device frames can be had for is read
//! from the host's memory, byte for byte, and moves to the device when there is room.

use std::sync::Arc;

use vbar::driver::kernel::{checksum, pattern};
use vbar::driver::{DeviceAttribute, Driver, KernelCall};
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::options::{HostMapped, RuntimeOptions};
use vbar::units::{DeviceAddress, DeviceOrdinal, PageSize, Stream};
use vbar::{Fault, Guard, ModelBar, Reason, Runtime};

const SEED: u64 = 23;
const PAGES: u64 = 8;

/// Whether the device can map host memory.
pub(crate) fn is_supported(driver: &dyn Driver, device: DeviceOrdinal) -> bool {
    let attribute = DeviceAttribute::HostNumaVirtualMemoryManagementSupported;
    driver.device_get_attribute(device, attribute).is_ok_and(|value| value == 1)
}

/// Runs the check on a device where nobody else has a runtime.
pub(crate) fn check_host_mapped(driver: &Arc<dyn Driver>, device: DeviceOrdinal, page: u64) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.safetensors");
    synthesize(&path, PAGES * page, SEED).expect("a model");
    let options = RuntimeOptions {
        page_size: PageSize::new(page).expect("a page size"),
        budget_bytes: Some(2 * page),
        headroom_bytes: Some(0),
        host_mapped: HostMapped::On,
        ..RuntimeOptions::default()
    };
    let runtime = Runtime::open(Arc::clone(driver), device, options).expect("a runtime");
    driver.ctx_set_current(Some(runtime.device().context)).expect("its context");
    driver.module_load().expect("the kernels");
    let stream = driver.stream_create().expect("a stream");
    let bar = runtime.open_model(&path).expect("the model");
    let whole = 0..bar.vbar().bytes();
    // The sums go to a page of their own, behind the runtime's back.
    let sums = driver.mem_address_reserve(page, 0).expect("addresses");
    let frame = driver.mem_create(device, page).expect("a frame");
    driver.mem_map(sums, page, frame).expect("a mapping");
    driver.mem_set_access(sums, page, &[device]).expect("access");

    let used = runtime.used_bytes();
    let Fault::HostMapped(guard) = bar.vbar().fault(whole.clone(), stream).expect("a fault") else {
        panic!("the range is larger than the budget");
    };
    assert_eq!(runtime.used_bytes(), used, "frames of the device were taken");
    assert_eq!(runtime.numbers().host_mapped_bytes, guard.bytes());
    check_bytes(driver, &bar, (&guard, stream), sums);
    let signature = guard.signature().to_vec();
    drop(guard);

    // Again from where it is, without reading the file.
    let filled = runtime.statistics().bytes_filled;
    let again = bar.vbar().fault(whole.clone(), stream).expect("a fault");
    assert_eq!(again.offloaded(), Some(Reason::HostMapped));
    let guard = again.readable().expect("its guard");
    assert_eq!(guard.signature(), signature);
    assert_eq!(runtime.statistics().bytes_filled, filled);
    drop(guard);

    driver.stream_synchronize(stream).expect("the end of its uses");
    runtime.set_budget(Some(PAGES * 2 * page)).expect("a larger budget");
    let guard = bar.vbar().fault(whole, stream).expect("a fault").resident().expect("room");
    assert_ne!(guard.signature(), signature);
    assert_eq!(runtime.numbers().host_mapped_bytes, 0);
    check_bytes(driver, &bar, (&guard, stream), sums);
    drop(guard);

    driver.mem_unmap(sums, page).expect("unmapping");
    driver.mem_release(frame).expect("releasing");
    driver.mem_address_free(sums, page).expect("freeing addresses");
    driver.stream_destroy(stream).expect("its end");
}

/// Every tensor's checksum, made by a kernel that reads it where it is.
fn check_bytes(
    driver: &Arc<dyn Driver>,
    bar: &ModelBar,
    (guard, stream): (&Guard<'_>, Stream),
    sums: DeviceAddress,
) {
    let tensors = bar.model().tensors();
    driver.memset_d8_async(sums, 0, tensors.len() as u64 * 8, stream).expect("zeros");
    for (index, tensor) in tensors.iter().enumerate() {
        let source = guard.address().offset(bar.range(index).start);
        let (bytes, target) = (tensor.bytes, sums.offset(index as u64 * 8));
        let call = KernelCall::Checksum { source, bytes, first_word: 0, delay_nanos: 0, target };
        driver.launch_kernel(call, stream).expect("a launch");
    }
    let words = vbar::host::locked::allocate(driver, 1, tensors.len() * 8);
    let mut words = words.expect("page-locked memory").remove(0);
    words.copy_from_device(0..tensors.len() * 8, sums, stream).expect("a copy");
    driver.stream_synchronize(stream).expect("its end");
    for (tensor, word) in tensors.iter().zip(words.bytes_mut().chunks_exact(8)) {
        let mut expected = vec![0; tensor.bytes as usize];
        pattern(&mut expected, tensor_seed(SEED, &tensor.name));
        let sum = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        assert_eq!(sum, checksum(&expected, 0), "{}", tensor.name);
    }
}
