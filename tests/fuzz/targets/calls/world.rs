//! What lives while an input runs, and how arguments are drawn: mostly good ones, so that sequences
//! come far, and all kinds of bad ones.

#![expect(unsafe_code, reason = "reads what calls have written through pointers")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use vbar::ffi::device::VbarDevice;
use vbar::ffi::fault::VbarFault;
use vbar::ffi::sim::{VbarSim, VbarSimLive};
use vbar::ffi::token::VbarToken;

use super::abi;
use super::simulated::Streams;
use super::torch::Torch;
use super::{Bytes, message};

/// What has ids.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Device,
    Bar,
    Allocation,
    Token,
    Model,
    Sim,
    Graph,
}

const KINDS: usize = 7;
pub(super) const PAGE_BYTES: u64 = 64 << 10;
pub(super) const STREAM_NONE: usize = usize::MAX;
/// Bytes of one place that calls write to; no struct claims more.
const PLACE_BYTES: usize = (1 << 16) + 64;
const PLACES: usize = 4;

/// Devices that are opened: scarce, and one page size. The address space is added.
const DRIVERS: &[(&str, u64)] = &[
    ("seed=1", 1 << 40),
    ("poison=1", 1 << 40),
    ("seed=2,mappings=20", 16 << 20),
    ("seed=3,devices=2,read_only=1", 1 << 40),
    ("seed=4,vmm=0", 1 << 40),
    ("seed=5,host_vmm=0,jitter=128K,checked=1", 1 << 40),
];

/// The devices of one input. Those of equal options are one device while anybody has it open, and
/// an input in which calls failed may leave one open: an odd number of bytes, which no reservation
/// has, tells them apart.
fn drivers() -> Vec<CString> {
    static INPUTS: AtomicU32 = AtomicU32::new(0);
    let odd = u64::from(INPUTS.fetch_add(1, Ordering::Relaxed)) % PAGE_BYTES;
    let text = |(more, space): &(&str, u64)| {
        let space = space + odd;
        format!("sim:capacity=4M,granularity=64K,on_violation=record,address_space={space},{more}")
    };
    DRIVERS.iter().map(|driver| CString::new(text(driver)).expect("no zero")).collect()
}

/// A token that was not given back.
#[derive(Clone, Copy)]
pub(super) struct Live {
    pub(super) token: u64,
    pub(super) device: u64,
    pub(super) stream: usize,
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// Its VBAR, and what it was faulted by: that, an allocation, or a model.
    pub(super) bar: u64,
    pub(super) of: u64,
    /// Work of the program uses its bytes.
    pub(super) is_used: bool,
    /// Its holder may write it, on that stream.
    pub(super) to_write: bool,
    /// Somebody has promised its bytes: they may be read.
    pub(super) to_read: bool,
}

pub(super) struct World {
    drivers: Vec<CString>,
    /// Every id that was given out, closed or not.
    ids: [Vec<u64>; KINDS],
    places: Box<[[u64; PLACE_BYTES / 8]; PLACES]>,
    pub(super) tokens: Vec<Live>,
    /// Of each VBAR, allocation and model: its VBAR, and its device.
    pub(super) owners: BTreeMap<u64, (u64, u64)>,
    pub(super) streams: Streams,
    pub(super) torch: Torch,
    /// The simulated device behind each device that was opened.
    pub(super) sims: BTreeMap<u64, VbarSim>,
    /// The context of each: devices are told apart by it.
    pub(super) contexts: BTreeMap<u64, usize>,
    /// Sources of memory that were handed over.
    pub(super) leases: u32,
    /// A driver call was made to fail, or a device was lost: what cannot be undone may stay.
    pub(super) disturbed: bool,
    pub(super) exports: Vec<(u32, *mut c_void)>,
}

/// How often memory was given back.
pub(super) static RELEASED: AtomicU32 = AtomicU32::new(0);

impl World {
    pub(super) fn new(bytes: &mut Bytes<'_>) -> Self {
        RELEASED.store(0, Ordering::SeqCst);
        let torch = Torch::new();
        let mut world = Self {
            drivers: drivers(),
            ids: Default::default(),
            places: vec![[0; PLACE_BYTES / 8]; PLACES].into_boxed_slice().try_into().expect("four"),
            tokens: Vec::new(),
            owners: BTreeMap::new(),
            streams: Streams::default(),
            sims: BTreeMap::new(),
            contexts: BTreeMap::new(),
            leases: 0,
            disturbed: false,
            exports: Vec::new(),
            torch,
        };
        world.keep(Kind::Device, world.torch.device.id);
        // Most inputs need a device first.
        super::memory::open_usual(&mut world, bytes);
        world
    }

    pub(super) fn keep(&mut self, kind: Kind, id: u64) {
        self.ids[kind as usize].push(id);
    }

    /// An id: of that kind mostly, the newest ones most often.
    pub(super) fn id(&self, kind: Kind, bytes: &mut Bytes<'_>) -> u64 {
        let choice = usize::from(bytes.byte());
        let own = &self.ids[kind as usize];
        let newest = |ids: &[u64], at: usize| match ids.len() {
            0 => 0,
            count => ids[count - 1 - at % count],
        };
        match choice {
            0..=127 => newest(own, choice % 4),
            128..=219 => newest(own, choice - 128),
            220..=235 => newest(&self.ids[choice % KINDS], choice / KINDS),
            236..=245 => newest(own, 0) ^ [0x80_0000, 1 << 24, 1 << 60, 1, 0xF0_0000][choice % 5],
            _ => [0, 1, 0xdead, u64::MAX, 1 << 63][choice % 5],
        }
    }

    /// The name of one of the input's devices, which lives as long as the input.
    pub(super) fn driver(&self, bytes: &mut Bytes<'_>) -> *const c_char {
        self.drivers[usize::from(bytes.byte()) % self.drivers.len()].as_ptr()
    }

    pub(super) fn device(&self, bytes: &mut Bytes<'_>) -> VbarDevice {
        VbarDevice { id: self.id(Kind::Device, bytes) }
    }

    /// A place for a result: good, NULL, or not aligned.
    pub(super) fn out<T>(&mut self, place: usize, bytes: &mut Bytes<'_>) -> *mut T {
        let base = self.places[place].as_mut_ptr().cast::<u8>();
        match bytes.byte() {
            254 => std::ptr::null_mut(),
            255 => base.wrapping_add(1).cast(),
            _ => base.cast(),
        }
    }

    /// The same for a struct that grows: its size field is set, and the rest is zeros.
    pub(super) fn growing<T>(&mut self, place: usize, bytes: &mut Bytes<'_>) -> *mut T {
        self.places[place].fill(0);
        let size = match bytes.byte() {
            choice @ 246..=255 => {
                let own = size_of::<T>();
                let sizes = [0, 1, 8, own - 1, own + 8, 65536, 65537, usize::MAX, 4096, own - 8];
                sizes[usize::from(choice) - 246]
            }
            _ => size_of::<T>(),
        };
        self.places[place][0] = size as u64;
        self.out(place, bytes)
    }

    /// What a call has written to a place.
    pub(super) fn read<T: Copy>(&self, place: usize) -> T {
        const { assert!(size_of::<T>() <= PLACE_BYTES && align_of::<T>() <= 8) };
        // SAFETY: the place has as many bytes, aligned; the types read are C structs of integers
        // and pointers, of which all bits are values.
        unsafe { self.places[place].as_ptr().cast::<T>().read() }
    }

    /// Writes an argument that is given by its address.
    pub(super) fn write<T: Copy>(&mut self, place: usize, at: usize, value: T) {
        assert!((at + 1) * size_of::<T>() <= PLACE_BYTES && align_of::<T>() <= 8);
        let base = self.places[place].as_mut_ptr().cast::<T>();
        // SAFETY: within the place, as was just checked; aligned.
        unsafe { base.wrapping_add(at).write(value) };
    }

    /// A number of bytes or an offset: of a few pages mostly.
    pub(super) fn size(bytes: &mut Bytes<'_>) -> u64 {
        match bytes.byte() {
            choice @ 0..=99 => u64::from(choice % 20) * PAGE_BYTES / 2,
            choice @ 100..=199 => u64::from(choice) * 511,
            200..=229 => 0,
            choice @ 230..=249 => {
                let edges = [1, 511, 1 << 32, 1 << 40, (1 << 47) - 1, 1 << 63, u64::MAX];
                edges[usize::from(choice) % 7].wrapping_sub(u64::from(choice % 3))
            }
            _ => bytes.word(),
        }
    }

    /// What a fault has come to is kept, if there is a token.
    pub(super) fn keep_fault(&mut self, fault: VbarFault, of: u64, stream: usize, read: bool) {
        if fault.token.id == 0 {
            return;
        }
        let (bar, device) = self.owner(of);
        self.keep(Kind::Token, fault.token.id);
        let to_write = fault.outcome == 2;
        self.tokens.push(Live {
            token: fault.token.id,
            device,
            stream,
            address: fault.address,
            bytes: fault.bytes,
            bar,
            of,
            is_used: false,
            to_write,
            to_read: read && !to_write,
        });
    }

    /// The VBAR and the device of what was faulted.
    pub(super) fn owner(&self, of: u64) -> (u64, u64) {
        self.owners.get(&of).copied().unwrap_or_default()
    }

    /// Whether it is on PyTorch's device, which never waits for its whole context: closed with a
    /// use that no fence covers, its frames would stay.
    pub(super) fn is_torchs(&self, of: u64) -> bool {
        self.owner(of).1 == self.torch.device.id
    }

    pub(super) fn forget_token(&mut self, token: u64) -> Option<Live> {
        let at = self.tokens.iter().position(|live| live.token == token)?;
        Some(self.tokens.remove(at))
    }

    /// The stream that a token was faulted for, or another one.
    pub(super) fn stream_of(&self, token: u64, bytes: &mut Bytes<'_>) -> usize {
        let own = self.tokens.iter().find(|live| live.token == token);
        match (own, bytes.byte()) {
            (Some(own), 0..=199) => own.stream,
            // A promise that the work is done.
            (Some(own), 200..=219) if own.is_used => own.stream,
            (_, 200..=219) => STREAM_NONE,
            _ => self.streams.draw(bytes),
        }
    }

    pub(super) fn let_go(&mut self) {
        self.streams.let_go();
    }

    /// Closes everything that was given out, and looks at what is left.
    pub(super) fn end(mut self) {
        self.let_go();
        self.streams.end_captures();
        for sim in self.sims.values() {
            abi::vbar_sim_heal(*sim);
            abi::vbar_sim_set_outside_bytes(*sim, 0);
        }
        super::models::delete_exports(&mut self);
        super::models::forget_callbacks();
        // What is waited for comes, however busy the machine is.
        for device in &self.ids[Kind::Device as usize] {
            abi::vbar_device_set_wait_timeout(VbarDevice { id: *device }, 60_000);
        }
        for live in std::mem::take(&mut self.tokens) {
            abi::vbar_token_unpin(VbarToken { id: live.token }, live.stream);
        }
        self.torch.end();
        self.streams.synchronize();
        self.torch.synchronize();
        super::memory::close_all(&self.ids);
        self.streams.destroy();
        for device in &self.ids[Kind::Device as usize] {
            abi::vbar_device_close(VbarDevice { id: *device });
        }
        for id in &self.ids[Kind::Sim as usize] {
            abi::vbar_sim_close(VbarSim { id: *id });
        }
        self.check_nothing_left();
    }

    fn check_nothing_left(&mut self) {
        let sims = std::mem::take(&mut self.sims);
        for sim in sims.values() {
            self.check_sim(*sim);
            assert_eq!(abi::vbar_sim_close(*sim), 0);
        }
        let released = RELEASED.load(Ordering::SeqCst);
        let all = released == self.leases || self.disturbed && released < self.leases;
        assert!(all, "of {} sources of memory {released} were given back", self.leases);
        self.torch.check();
    }

    fn check_sim(&mut self, sim: VbarSim) {
        check_violations(sim);
        let mut live = VbarSimLive { size: size_of::<VbarSimLive>(), ..zeroed() };
        assert_eq!(abi::vbar_sim_live(sim, &raw mut live), 0);
        let left = [
            live.frame_count,
            live.used_bytes,
            live.reservation_count,
            live.mapping_count,
            live.locked_bytes,
            live.event_count,
            live.stream_count,
        ];
        assert!(self.disturbed || left == [0; 7], "left behind: {left:?}; {}", message());
    }
}

/// No rule of CUDA was broken.
pub(super) fn check_violations(sim: VbarSim) {
    let mut count = 0;
    assert_eq!(abi::vbar_sim_violation_count(sim, &raw mut count), 0, "{}", message());
    if count > 0 {
        let mut text = [0_u8; 2000];
        abi::vbar_sim_violation(sim, 0, text.as_mut_ptr().cast(), text.len());
        panic!("{count} violations: {}", String::from_utf8_lossy(&text).trim_end_matches('\0'));
    }
}

/// A C struct of zeros.
pub(super) fn zeroed<T: Copy>() -> T {
    // SAFETY: used for C structs of integers, pointers and optional functions alone.
    unsafe { std::mem::zeroed() }
}

/// Files that calls name, in memory: a model, and one that is none.
pub(super) struct Files {
    pub(super) model: Named,
    pub(super) raw: Named,
    /// What a record of requests is written to.
    pub(super) written: Named,
}

pub(super) struct Named {
    pub(super) file: OwnedFd,
    pub(super) path: CString,
}

pub(super) fn files() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| {
        let tensor = |name: &str, dtype: &str, shape: &str, start: u32, end: u32| {
            let place = format!(r#""shape":{shape},"data_offsets":[{start},{end}]"#);
            format!(r#""{name}":{{"dtype":"{dtype}",{place}}}"#)
        };
        let header = format!(
            r#"{{"__metadata__":{{"key":"value"}},{},{},{}}}"#,
            tensor("a", "U8", "[70000]", 0, 70_000),
            tensor("b", "F32", "[100,10]", 70_000, 74_000),
            tensor("c", "F4", "[0]", 74_000, 74_000)
        );
        let mut model = (header.len() as u64).to_le_bytes().to_vec();
        model.extend_from_slice(header.as_bytes());
        model.extend((0..74_000).map(|at| (at % 253) as u8));
        let raw: Vec<u8> = (0..4 * PAGE_BYTES).map(|at| (at % 251) as u8).collect();
        Files { model: named(&model), raw: named(&raw), written: named(b"") }
    })
}

fn named(content: &[u8]) -> Named {
    use rustix::fs::{MemfdFlags, memfd_create};
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("memory");
    let file = std::fs::File::from(file);
    file.write_all_at(content, 0).expect("memory");
    let file = OwnedFd::from(file);
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("no zero");
    Named { file, path }
}

/// A path: of a good file, or of nothing that is one.
pub(super) fn path(bytes: &mut Bytes<'_>) -> *const std::ffi::c_char {
    let files = files();
    match bytes.byte() {
        0..=179 => files.model.path.as_ptr(),
        180..=209 => files.raw.path.as_ptr(),
        210..=219 => c"/nonexistent/model.safetensors".as_ptr(),
        220..=229 => c"/proc/self".as_ptr(),
        230..=239 => c"".as_ptr(),
        240..=247 => c"/dev/zero".as_ptr(),
        248..=251 => c"\xff\xfe\n".as_ptr(),
        _ => std::ptr::null(),
    }
}
