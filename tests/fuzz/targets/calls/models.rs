//! Models, hints, DLPack, messages and waits.

use std::ffi::{c_char, c_void};
use std::os::fd::AsRawFd;
use std::sync::Mutex;

use vbar::ffi::bar::VbarBar;
use vbar::ffi::dlpack::VbarDlpackTensor;
use vbar::ffi::fault::VbarRange;
use vbar::ffi::model::{VbarModel, VbarModelInfo};
use vbar::ffi::token::VbarToken;

use super::abi::*;
use super::world::{Kind, STREAM_NONE, World, files, path, zeroed};
use super::{Bytes, Came, Op};

pub(super) const OPS: &[Op] = &[
    ("vbar_model_open", |w, b| {
        let device = w.device(b);
        let status = vbar_model_open(device, path(b), w.out(0, b));
        keep(w, device.id, status)
    }),
    ("vbar_model_open", |w, b| {
        let device = w.device(b);
        let status = vbar_model_open(device, files().model.path.as_ptr(), w.out(0, b));
        keep(w, device.id, status)
    }),
    ("vbar_model_open_descriptor", |w, b| {
        let device = w.device(b);
        let good = [files().model.file.as_raw_fd(), files().raw.file.as_raw_fd()];
        let descriptor = b.one_of(&[good[0], good[0], good[0], good[1], -1, i32::MAX]);
        let name = path(b);
        let status = vbar_model_open_descriptor(device, descriptor, name, w.out(0, b));
        keep(w, device.id, status)
    }),
    ("vbar_model_close", |w, b| {
        let model = model(w, b);
        if w.is_torchs(model.id) { None } else { Some(vbar_model_close(model)) }
    }),
    ("vbar_model_info", |w, b| Some(vbar_model_info(model(w, b), w.growing(0, b)))),
    ("vbar_model_tensor", |w, b| {
        let (model, index) = (model(w, b), index(b));
        Some(vbar_model_tensor(model, index, w.growing(0, b)))
    }),
    ("vbar_model_find", |w, b| {
        let name = b.one_of(&[c"a", c"b", c"", c"missing\n", c"\xff"]).as_ptr();
        let name = if b.byte() > 250 { std::ptr::null() } else { name };
        Some(vbar_model_find(model(w, b), name, w.out(0, b)))
    }),
    ("vbar_model_metadata", |w, b| {
        let key = b.one_of(&[c"key", c"", c"missing", c"\xff"]).as_ptr();
        let key = if b.byte() > 250 { std::ptr::null() } else { key };
        Some(vbar_model_metadata(model(w, b), key, w.out(0, b)))
    }),
    ("vbar_model_file", |w, b| {
        let (model, index) = (model(w, b), b.one_of(&[0, 0, 1, u32::MAX]));
        Some(vbar_model_file(model, index, w.out(0, b)))
    }),
    ("vbar_model_fault", |w, b| fault(w, b)),
    ("vbar_model_fault", |w, b| fault(w, b)),
    ("vbar_model_fault", |w, b| fault(w, b)),
    ("vbar_model_prefetch", |w, b| Some(vbar_model_prefetch(model(w, b), index(b)))),
    ("vbar_bar_prefetch", |w, b| {
        let bar = VbarBar { id: w.id(Kind::Bar, b) };
        Some(vbar_bar_prefetch(bar, World::size(b), World::size(b)))
    }),
    ("vbar_bar_prepare_save", |w, b| {
        let bar = VbarBar { id: w.id(Kind::Bar, b) };
        Some(vbar_bar_prepare_save(bar, World::size(b), World::size(b)))
    }),
    ("vbar_bar_save", |w, b| {
        // On a stream it would be a race with whoever writes the bytes.
        let bar = VbarBar { id: w.id(Kind::Bar, b) };
        Some(vbar_bar_save(bar, World::size(b), World::size(b), STREAM_NONE))
    }),
    ("vbar_bar_drop_save", |w, b| {
        let bar = VbarBar { id: w.id(Kind::Bar, b) };
        Some(vbar_bar_drop_save(bar, World::size(b), World::size(b)))
    }),
    ("vbar_model_schedule_hint", |w, b| {
        let (model, count) = (model(w, b), usize::from(b.byte()) % 8);
        (0..count).for_each(|at| w.write(0, at, index(b)));
        let told = if b.byte() > 250 { usize::MAX / 8 } else { count };
        Some(vbar_model_schedule_hint(model, w.out(0, b), told))
    }),
    ("vbar_device_schedule_hint", |w, b| hint(w, b)),
    ("vbar_dlpack_export", |w, b| {
        let (token, stream) = dlpack_token(w, b);
        let (tensor, form) = tensor(w, token.id, b);
        let status = vbar_dlpack_export(token, stream, tensor, w.out(1, b));
        if status == 0 {
            w.forget_token(token.id);
            w.exports.push((form, w.read(1)));
        }
        Some(status)
    }),
    ("vbar_dlpack_export_capsule", |w, b| {
        let (token, stream) = dlpack_token(w, b);
        let (tensor, _) = tensor(w, token.id, b);
        let capsule = if b.byte() > 240 { std::ptr::null_mut() } else { CAPSULE };
        let status = vbar_dlpack_export_capsule(token, stream, tensor, capsule);
        if status == 0 {
            w.forget_token(token.id);
        }
        Some(status)
    }),
    ("vbar_dlpack_capsule_destructor", |w, b| {
        if let Some((form, managed)) = w.exports.pop() {
            delete(form, managed);
        }
        let capsule = b.one_of(&[CAPSULE, std::ptr::null_mut()]);
        vbar_dlpack_capsule_destructor(capsule);
        if !capsule.is_null() {
            empty_capsule();
        }
        None
    }),
    ("vbar_dlpack_set_capsule_functions", |_, b| {
        let mut functions = capsule_functions();
        if b.byte() > 200 {
            functions[usize::from(b.byte()) % 4] = std::ptr::null_mut();
        }
        let [is_valid, get, set, name] = functions;
        Some(vbar_dlpack_set_capsule_functions(is_valid, get, set, name))
    }),
    ("vbar_log_set_level", |_, b| Some(vbar_log_set_level(b.one_of(&[0, 2, 3, 4, 6, u32::MAX])))),
    ("vbar_log_set_callback", |_, b| {
        let callback =
            if b.byte() < 128 { Some(taken as unsafe extern "C" fn(_, _, _)) } else { None };
        Some(vbar_log_set_callback(callback, std::ptr::null_mut()))
    }),
    ("vbar_log_poll", |w, b| {
        let capacity = b.one_of(&[0, 1, 10, 4000, usize::MAX]);
        Some(vbar_log_poll(w.out(0, b), capacity, w.out(1, b), w.out(2, b)))
    }),
    ("vbar_thread_set_wait_check", |_, b| {
        let check =
            if b.byte() < 128 { Some(asked as unsafe extern "C" fn(_) -> i32) } else { None };
        let user = std::ptr::without_provenance_mut(usize::from(b.byte() > 200));
        Some(vbar_thread_set_wait_check(check, user))
    }),
    ("vbar_device_set_wait_timeout", |w, b| {
        // What waits longer would keep us; a limit past every clock is taken and told.
        let device = w.device(b);
        let status = vbar_device_set_wait_timeout(device, b.one_of(&[0, 1, 5, u64::MAX, 1 << 63]));
        if status == 0 {
            vbar_device_refresh(device);
            vbar_device_set_wait_timeout(device, 5);
        }
        Some(status)
    }),
    ("vbar_device_cancel_waits", |w, b| Some(vbar_device_cancel_waits(w.device(b)))),
    ("vbar_abi_version", |_, _| {
        assert_eq!(vbar_abi_version(), 1);
        None
    }),
    ("vbar_version", |_, _| is_text(vbar_version())),
    ("vbar_status_text", |_, b| is_text(vbar_status_text(b.word() as i32))),
    ("vbar_status_text", |_, b| is_text(vbar_status_text(i32::from(b.byte())))),
    ("vbar_reason_text", |_, b| is_text(vbar_reason_text(b.one_of(&[0, 5, 12, 13, u32::MAX])))),
    ("vbar_dtype_text", |_, b| is_text(vbar_dtype_text(b.one_of(&[0, 5, 22, 23, u32::MAX])))),
    ("vbar_last_message", |_, _| is_text(vbar_last_message())),
];

fn is_text(text: *const c_char) -> Came {
    assert!(!text.is_null());
    None
}

fn model(world: &World, bytes: &mut Bytes<'_>) -> VbarModel {
    VbarModel { id: world.id(Kind::Model, bytes) }
}

fn index(bytes: &mut Bytes<'_>) -> u64 {
    match bytes.byte() {
        choice @ 0..=239 => u64::from(choice % 3),
        240..=247 => 3,
        _ => u64::MAX,
    }
}

/// Keeps a model and its VBAR.
fn keep(world: &mut World, device: u64, status: i32) -> Came {
    if status == 0 {
        let model = world.read::<VbarModel>(0);
        world.keep(Kind::Model, model.id);
        let mut info = VbarModelInfo { size: size_of::<VbarModelInfo>(), ..zeroed() };
        assert_eq!(vbar_model_info(model, &raw mut info), 0);
        world.keep(Kind::Bar, info.bar.id);
        world.owners.insert(model.id, (info.bar.id, device));
        world.owners.insert(info.bar.id, (info.bar.id, device));
    }
    Some(status)
}

fn fault(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let (model, index) = (model(world, bytes), index(bytes));
    let stream = world.streams.draw(bytes);
    let status = vbar_model_fault(model, index, stream, world.out(0, bytes));
    if status == 0 {
        world.keep_fault(world.read(0), model.id, stream, true);
    }
    Some(status)
}

fn hint(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let (device, steps) = (world.device(bytes), usize::from(bytes.byte()) % 4);
    let mut ranges = 0;
    for at in 0..steps {
        let count = usize::from(bytes.byte()) % 3;
        world.write(1, at, count);
        for _ in 0..count {
            let bar = VbarBar { id: world.id(Kind::Bar, bytes) };
            let range = VbarRange { bar, bar_offset: World::size(bytes), bytes: 100 };
            world.write(0, ranges, range);
            ranges += 1;
        }
    }
    if steps > 0 && bytes.byte() > 250 {
        world.write(1, 0, usize::MAX / 4);
    }
    let told = if bytes.byte() > 250 { usize::MAX / 16 } else { steps };
    let (ranges, counts) = (world.out(0, bytes), world.out(1, bytes));
    Some(vbar_device_schedule_hint(device, ranges, counts, told))
}

/// A token, and the stream that it was faulted for.
fn dlpack_token(world: &World, bytes: &mut Bytes<'_>) -> (VbarToken, usize) {
    let token = VbarToken { id: world.id(Kind::Token, bytes) };
    let own = world.tokens.iter().find(|live| live.token == token.id);
    (token, own.map_or(0, |live| live.stream))
}

/// Describes a tensor in the token's pages, or nearly.
fn tensor(world: &mut World, token: u64, bytes: &mut Bytes<'_>) -> (*const VbarDlpackTensor, u32) {
    let address = world.tokens.iter().find(|live| live.token == token).map_or(0, |it| it.address);
    let shape: *mut u64 = world.out(2, bytes);
    for at in 0..4 {
        let count = bytes.one_of(&[1, 2, 3, 8, 0, 1 << 32, 1 << 62, u64::MAX]);
        world.write(2, at, count);
    }
    let place: *mut VbarDlpackTensor = world.growing(0, bytes);
    let size = world.read::<usize>(0);
    let form = bytes.one_of(&[0, 1, 0, 1, 0, 1, 2]);
    world.write(
        0,
        0,
        VbarDlpackTensor {
            size,
            address: if bytes.byte() > 240 { World::size(bytes) } else { address },
            shape,
            rank: bytes.one_of(&[0, 1, 1, 1, 2, 3, 4, 65, u32::MAX]),
            dtype: u32::from(bytes.byte()) % 24,
            form,
            access: bytes.one_of(&[0, 1, 2]),
        },
    );
    (place, form)
}

/// Runs the deleters of what was exported, as consumers would.
pub(super) fn delete_exports(world: &mut World) {
    for (form, managed) in std::mem::take(&mut world.exports) {
        delete(form, managed);
    }
    vbar_dlpack_capsule_destructor(CAPSULE);
    empty_capsule();
}

fn delete(form: u32, managed: *mut c_void) {
    /// Words before the deleter: a version and a context, or a tensor of 48 bytes and a context.
    const BEFORE: [usize; 2] = [2, 7];
    let words = managed.cast::<Option<extern "C" fn(*mut c_void)>>();
    let place = words.wrapping_add(BEFORE[form as usize]);
    #[expect(unsafe_code, reason = "a struct of DLPack's")]
    // SAFETY: both structs have a pointer to a function at that place, by DLPack's header.
    let deleter = unsafe { place.read() };
    deleter.expect("a deleter")(managed);
}

/// No callback of ours stays for the next input.
pub(super) fn forget_callbacks() {
    vbar_thread_set_wait_check(None, std::ptr::null_mut());
    vbar_log_set_callback(None, std::ptr::null_mut());
    vbar_log_set_level(0);
}

extern "C" fn taken(_level: u32, message: *const c_char, _user: *mut c_void) {
    assert!(!message.is_null());
}

extern "C" fn asked(user: *mut c_void) -> i32 {
    i32::from(!user.is_null())
}

/// What stands in for Python: one capsule, which is it only by its address.
const CAPSULE: *mut c_void = std::ptr::without_provenance_mut(0xCA50);
const EMPTY: &std::ffi::CStr = c"vbar_dlpack_empty";

struct Capsule {
    name: usize,
    pointer: usize,
}

static CAPSULE_NOW: Mutex<Capsule> = Mutex::new(Capsule { name: 0, pointer: 0 });

fn empty_capsule() {
    let mut capsule = CAPSULE_NOW.lock().expect("nobody panics in there");
    *capsule = Capsule { name: EMPTY.as_ptr().expose_provenance(), pointer: 1 };
}

fn text_at(address: usize) -> String {
    let text: *const c_char = std::ptr::with_exposed_provenance(address);
    if text.is_null() {
        return String::new();
    }
    #[expect(unsafe_code, reason = "a C string")]
    // SAFETY: names of capsules are strings of static life time.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

extern "C" fn is_valid(capsule: *mut c_void, name: *const c_char) -> i32 {
    let now = CAPSULE_NOW.lock().expect("nobody panics in there");
    i32::from(capsule == CAPSULE && text_at(now.name) == text_at(name.expose_provenance()))
}

extern "C" fn get_pointer(_capsule: *mut c_void, _name: *const c_char) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(CAPSULE_NOW.lock().expect("no panics in there").pointer)
}

extern "C" fn set_pointer(_capsule: *mut c_void, pointer: *mut c_void) -> i32 {
    CAPSULE_NOW.lock().expect("no panics in there").pointer = pointer.expose_provenance();
    0
}

extern "C" fn set_name(_capsule: *mut c_void, name: *const c_char) -> i32 {
    CAPSULE_NOW.lock().expect("no panics in there").name = name.expose_provenance();
    0
}

fn capsule_functions() -> [*mut c_void; 4] {
    [
        is_valid as extern "C" fn(_, _) -> _ as *mut c_void,
        get_pointer as extern "C" fn(_, _) -> _ as *mut c_void,
        set_pointer as extern "C" fn(_, _) -> _ as *mut c_void,
        set_name as extern "C" fn(_, _) -> _ as *mut c_void,
    ]
}

/// Before the first input.
pub(super) fn prepare() {
    empty_capsule();
    let [is_valid, get, set, name] = capsule_functions();
    assert_eq!(vbar_dlpack_set_capsule_functions(is_valid, get, set, name), 0);
}
