//! What a runtime can be told when it is opened, with the defaults and their reasons.

use std::path::PathBuf;
use std::time::Duration;

use crate::units::{Context, MIB, PageSize};

/// How a frame in use gets to its next page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Eviction {
    /// The frame is mapped at its next address at once; streams wait for the victim's fences, and
    /// the host removes the old mapping when it has seen them pass. Nobody waits.
    #[default]
    Aliasing,
    /// A page loses its mapping before its frame goes elsewhere; the CPU waits for its fences. A
    /// use after the unpin then faults instead of reading other bytes: for debugging. See
    /// [`Poison`] for a milder end.
    Strict,
}

/// What a stale read finds: one through an address whose page was evicted.
///
/// For debugging: a program that uses a weight without its pin reads a pattern that can be told
/// from any weight, where its context would be lost. It takes one page of the budget and some
/// driver calls for each eviction. See [`POISON_BYTE`] for the pattern.
///
/// With [`Eviction::Strict`] the pattern is there as soon as the page has gone. With
/// [`Eviction::Aliasing`] the old mapping stays until the uses before it have passed, and a read
/// until then may see what comes next in the frame. A read that runs just while a page changes
/// hands can still be fatal, and what a stale *write* leaves is read behind all evicted pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Poison {
    /// Nothing: the access is fatal to the context.
    #[default]
    Off,
    /// [`POISON_BYTE`] in every byte of a page that was evicted and not faulted since. A page that
    /// never was faulted has nothing behind it.
    On,
}

/// Every byte of an evicted page with [`Poison::On`].
///
/// The one byte that reads as a NaN in all floating-point formats, whatever their width: f64, f32,
/// f16, bf16 and both of fp8, so that a stale weight makes every result a NaN at once. A processor
/// makes other NaNs of its own (`0x7FFFFFFF`, `0x7FFF`), so that all ones in memory tell where they
/// came from; as integers they are -1.
pub const POISON_BYTE: u8 = 0xFF;

/// Whether a frame is cleared before its bytes can be seen at another address.
///
/// Frames go from one page to the next without a word to the driver, and what was in them is there
/// until it is written over: bytes of another VBAR, of another owner's tensors. Clearing happens on
/// the device and in the order of the stream, before the page can be used: one `cuMemsetD8Async`
/// for each run of pages that come together, and nobody waits for it.
///
/// It is about this process. What goes back to the driver is the driver's to clear: NVIDIA's kernel
/// module does, when memory is freed, unless it was told not to (`bScrubOnFreeEnabled` in its
/// source, the registry key `RMDisableScrubOnFree`). CUDA's documentation promises nothing, so with
/// this option new frames are cleared too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Scrub {
    /// It is not: whoever gets a page that it writes itself finds what was in the frame.
    #[default]
    Off,
    /// Every frame that a page gets is cleared first, new ones included, for weights that the
    /// program writes and for PyTorch's tensors alike; of a page that is filled from files what
    /// they do not fill. A block of PyTorch's that is freed and given out again stays as it is, as
    /// with PyTorch's own allocator: both are one owner's; so do its blocks on a device without
    /// virtual memory management, each of which the driver gives and takes. A page that is faulted
    /// without a stream is cleared on the fill stream, which is made for it.
    On,
}

/// Options of a runtime. `Default` suits one program on one device.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// Most device memory for frames, in bytes; `None`: what the driver says is free, less the
    /// headroom, followed as it changes. A number is bounded by the same.
    pub budget_bytes: Option<u64>,
    /// Device memory left free for others, in bytes; `None`: 256 MiB, or what it was when the
    /// runtime is open already.
    pub headroom_bytes: Option<u64>,
    /// Size of pages and frames; a multiple of the device's granularity.
    pub page_size: PageSize,
    /// The context to work in; `None`: the device's primary context.
    pub context: Option<Context>,
    /// How frames move.
    pub eviction: Eviction,
    /// What a read finds through an address whose page was evicted.
    pub poison: Poison,
    /// Whether frames are cleared before another page has them.
    pub scrub: Scrub,
    /// Whether the CPU may wait for the whole context when no fence covers a page that must go.
    pub context_waits: ContextWaits,
    /// Longest time that a wait of one kind takes in a call, then `TimedOut`; what it is at first,
    /// see [`Runtime::set_wait_timeout`](crate::Runtime::set_wait_timeout).
    pub wait_timeout: Duration,
    /// The driver's free memory is asked at most this often.
    pub poll_interval: Duration,
    /// Time over which the smallest surplus is taken before a watermark heals by it.
    pub heal_window: Duration,
    /// Fences are recorded at most this often while everything fits.
    pub record_interval: Duration,
    /// Page-locked slots between file and device, 1 to [`STAGING_SLOTS_MAX`]. One of them is a
    /// page, rounded down to 16 MiB.
    pub staging_slot_count: usize,
    /// Whether what no device frames can be had for is read from host memory.
    pub host_mapped: HostMapped,
    /// Most host memory that may be page-locked and registered, host frames included, in bytes;
    /// `None`: what the system can spare. What it can spare for all devices of the process together
    /// bounds a number too.
    pub host_allowance: Option<u64>,
    /// Where model files are read from.
    pub prefer: Prefer,
    /// The folder that stands for `/` where the system says what memory it has, for tests.
    #[doc(hidden)]
    pub system_root: Option<PathBuf>,
    /// Whether the runtime has threads of its own; `None`: it has none, or what it was when the
    /// runtime is open already.
    pub threads: Option<Threads>,
}

/// What a bound VBAR's range comes to that needs more device frames than it can have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HostMapped {
    /// It is offloaded.
    #[default]
    Off,
    /// Its missing pages get page-locked host memory, within the host's allowance, that the device
    /// reads at the speed of the link: see [`Fault::HostMapped`](crate::Fault::HostMapped). The
    /// pages move to device frames at the next fault for which there are some. Until then they keep
    /// their host memory, whoever comes after them. Where the device cannot map host memory it is
    /// as `Off`.
    On,
}

/// Where the bytes of a model file are read from, when they are not in page-locked memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Prefer {
    /// From the page cache what is there, or all of it when the model fits into what the host can
    /// spare; else past it. With threads, what is streamed again and again is read by the device
    /// from page-locked memory.
    #[default]
    Auto,
    /// Through the page cache: what was read once stays there as long as nobody needs the memory.
    /// With threads, what is streamed again and again is read by the device from there, where that
    /// is known to be safe: one copy in memory less, and slower until all of it is registered.
    Ram,
    /// Past the page cache (`O_DIRECT`), where the file system can; else through it.
    Disk,
}

/// See [`RuntimeOptions::threads`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Threads {
    /// Everything happens on the callers' threads: what other programs take from the device is
    /// noticed by the next fault, and nothing is fetched ahead of one.
    #[default]
    Off,
    /// Two threads that work, and some that read files for them.
    ///
    /// `vbar pressure` looks every 25 ms at what the driver says is free and gives memory back as
    /// a fault would, so that other programs get it while this one is idle. Where no fence covers a
    /// use, and [`ContextWaits::Allowed`], it records an event of the context, which breaks a
    /// capture of a stream that the library has not met yet: a program that captures sets
    /// [`ContextWaits::Never`].
    ///
    /// `vbar engine` learns the order in which bound VBARs are faulted while they exceed the
    /// budget, says which of their pages stay, and fetches the others before they are asked for. It
    /// is never in the way: a fault that comes first helps itself, at most it waits for frames that
    /// the engine has in hand. Hints ([`Runtime::schedule_hint`](crate::Runtime::schedule_hint))
    /// and wishes ([`Vbar::prefetch`](crate::Vbar::prefetch)) are for it alone.
    On,
}

/// See [`RuntimeOptions::context_waits`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ContextWaits {
    /// One counted wait for an event of the context (`cuCtxRecordEvent`) rather than a refusal.
    /// Drivers older than CUDA 12.5 have no such event and get `cuCtxSynchronize`, which has no
    /// time-out, cannot be cancelled, and stops launches of other threads until it returns.
    #[default]
    Allowed,
    /// Refuse with `FenceUnknown`. With PyTorch's allocator on the device, which knows when a graph
    /// is being captured, a request waits all the same before it is refused for that.
    Never,
}

/// Most page-locked slots: 1 GiB of them. More of them bring nothing, and a number that is a
/// mistake must not lock the machine's memory.
pub const STAGING_SLOTS_MAX: usize = 64;

/// Headroom unless told otherwise, in bytes.
pub const HEADROOM_DEFAULT: u64 = 256 * MIB;

impl Default for RuntimeOptions {
    fn default() -> Self {
        Self {
            budget_bytes: None,
            headroom_bytes: None,
            page_size: PageSize::DEFAULT,
            context: None,
            eviction: Eviction::Aliasing,
            poison: Poison::Off,
            scrub: Scrub::Off,
            context_waits: ContextWaits::Allowed,
            wait_timeout: Duration::from_secs(30),
            poll_interval: Duration::from_millis(10),
            heal_window: Duration::from_secs(1),
            record_interval: Duration::from_micros(50),
            staging_slot_count: 4,
            host_mapped: HostMapped::Off,
            host_allowance: None,
            prefer: Prefer::Auto,
            system_root: None,
            threads: None,
        }
    }
}
