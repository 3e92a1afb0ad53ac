//! Model files: good ones open and read back; wrong, damaged and changing ones are typed errors
//! that name the file and the tensor, and nothing else happens to the process.

use std::fs::{self, File};
use std::io::{IoSliceMut, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use tempfile::TempDir;
use vbar::ErrorCode;
use vbar::driver::kernel;
use vbar::host::checksum::file_checksum;
use vbar::host::model_files::Model;
use vbar::host::safetensors::HEADER_BYTES_MAX;
use vbar::host::source::{FileIdentity, ModelFile, ReadAt};
use vbar::model::binding::lay_out;
use vbar::model::synth::{INDEX_NAME, SyntheticModel, synthesize, tensor_seed};
use vbar::units::{MIB, PageSize};

/// The bytes of a file: header length, header, then zeros.
fn file_bytes(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

fn entry(name: &str, start: u64, end: u64) -> String {
    let bytes = end - start;
    format!(r#""{name}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[{start},{end}]}}"#)
}

fn header_of(entries: &[String]) -> String {
    format!("{{{}}}", entries.join(","))
}

fn write_at(folder: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes).unwrap();
    path
}

/// A model of tensors of 8 bytes.
fn write_model(folder: &TempDir, name: &str, tensors: &[&str]) -> PathBuf {
    let entries: Vec<String> = tensors
        .iter()
        .enumerate()
        .map(|(index, tensor)| entry(tensor, index as u64 * 8, index as u64 * 8 + 8))
        .collect();
    write_at(folder, name, &file_bytes(&header_of(&entries), tensors.len() * 8))
}

fn write_index(folder: &TempDir, entries: &[(&str, &str)]) -> PathBuf {
    let map: Vec<String> =
        entries.iter().map(|(name, shard)| format!("{name:?}:{shard:?}")).collect();
    let text = format!(r#"{{"metadata":{{}},"weight_map":{{{}}}}}"#, map.join(","));
    write_at(folder, INDEX_NAME, text.as_bytes())
}

fn check_error(error: &vbar::Error, code: ErrorCode, words: &[&str]) {
    assert_eq!(error.code(), code, "{error}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "no {word} in: {text}");
    }
}

/// The model is refused; the error has the path and all of `words`.
fn check_refused(path: &Path, code: ErrorCode, words: &[&str]) {
    let error = Model::open(path).expect_err("was opened");
    check_error(&error, code, words);
    check_error(&error, code, &[path.to_str().unwrap()]);
}

/// The file of this header and data is refused as `Format`.
fn check_header_refused(header: &str, data_bytes: usize, words: &[&str]) {
    let folder = TempDir::new().unwrap();
    let path = write_at(&folder, "m.safetensors", &file_bytes(header, data_bytes));
    check_refused(&path, ErrorCode::Format, words);
}

fn names_of(model: &Model) -> Vec<&str> {
    model.tensors().iter().map(|tensor| &*tensor.name).collect()
}

/// Every tensor of a synthetic model has the bytes that its seed says.
fn check_bytes(model: &Model, seed: u64) {
    for tensor in model.tensors() {
        let mut wanted = vec![0; tensor.bytes as usize];
        kernel::pattern(&mut wanted, tensor_seed(seed, &tensor.name));
        let mut read = vec![0; wanted.len()];
        let file = &model.files()[tensor.file];
        file.read_exact_at(tensor.offset, &mut read).unwrap();
        assert!(read == wanted, "{} differs", tensor.name);
        let sum = file_checksum(file, tensor.offset, tensor.bytes).unwrap();
        assert_eq!(sum, kernel::checksum(&wanted, 0), "{}", tensor.name);
        assert_eq!(model.checksum(&tensor.name), Ok(sum));
        let at = |offset| model.tensor_at(tensor.file, offset) == Some(tensor);
        let end = tensor.offset + tensor.bytes;
        assert!(!at(end) && at(end.saturating_sub(1)) == (tensor.bytes > 0), "{}", tensor.name);
    }
}

#[test]
fn tensors_come_in_the_order_of_layers() {
    let folder = TempDir::new().unwrap();
    let path = write_model(&folder, "m.safetensors", &["layers.10.w", "layers.2.w", "emb"]);
    for opened in [&path, &folder.path().to_owned()] {
        let model = Model::open(opened).unwrap();
        assert_eq!(names_of(&model), ["emb", "layers.2.w", "layers.10.w"]);
        assert_eq!(model.total_bytes(), 24);
        assert_eq!(model.tensor("layers.2.w").unwrap().bytes, 8);
        let error = model.tensor("layers.3.w").unwrap_err();
        check_error(&error, ErrorCode::NotFound, &["layers.3.w", "m.safetensors"]);
    }
}

#[test]
fn a_descriptor_opens_as_a_path_does() {
    let folder = TempDir::new().unwrap();
    let path = write_model(&folder, "m.safetensors", &["w"]);
    let descriptor = OwnedFd::from(File::open(&path).unwrap());
    fs::remove_file(&path).unwrap();
    let model = Model::from_file(ModelFile::from_fd(descriptor, "a download").unwrap()).unwrap();
    assert_eq!((model.name(), names_of(&model)), ("a download", vec!["w"]));
}

#[test]
fn wrong_headers_are_refused_with_file_and_tensor() {
    let one = |start, end| header_of(&[entry("w", start, end)]);
    check_header_refused(&one(0, 8), 7, &["'w'", "ends at 8"]);
    check_header_refused(&one(8, 16), 16, &["'w'", "hole"]);
    let overlap = header_of(&[entry("first", 0, 8), entry("w", 7, 15)]);
    check_header_refused(&overlap, 15, &["'w'", "'first'", "overlaps"]);
    let twice = header_of(&[entry("w", 0, 8), entry("w", 8, 16)]);
    check_header_refused(&twice, 16, &["'w'", "twice"]);
    let size = r#"{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#;
    check_header_refused(size, 8, &["'w'", "has 12"]);
    let huge = r#"{"w":{"dtype":"F32","shape":[9223372036854775807,9],"data_offsets":[0,8]}}"#;
    check_header_refused(huge, 8, &["'w'", "2^64"]);
}

#[test]
fn files_that_are_no_models_are_refused() {
    let folder = TempDir::new().unwrap();
    let too_large = (HEADER_BYTES_MAX + 1).to_le_bytes();
    for (name, bytes, word) in [
        ("empty", &b""[..], "0 bytes"),
        ("page", b"<!DOCTYPE html><html></html>", "not a safetensors file"),
        ("large", &too_large, "limit"),
        ("cut", b"\x10\0\0\0\0\0\0\0{\"w\":", "does not fit"),
        ("bytes", b"\x08\0\0\0\0\0\0\0{\"\xFF\xFE\":1}", "UTF-8"),
    ] {
        let path = write_at(&folder, name, bytes);
        check_refused(&path, ErrorCode::Format, &[word]);
    }
    check_refused(&folder.path().join("absent"), ErrorCode::Io, &["No such file"]);
    check_refused(folder.path(), ErrorCode::Format, &["no *.safetensors file"]);
    check_refused(Path::new("/dev/null"), ErrorCode::Format, &["not a regular file"]);
}

#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("m.safetensors");
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    check_refused(&path, ErrorCode::Format, &["not a regular file"]);
}

#[test]
fn a_header_that_claims_more_than_the_file_reads_nothing() {
    let folder = TempDir::new().unwrap();
    let path = write_at(&folder, "m.safetensors", &HEADER_BYTES_MAX.to_le_bytes());
    check_refused(&path, ErrorCode::Format, &["does not fit"]);
    File::options().write(true).open(&path).unwrap().set_len(HEADER_BYTES_MAX + 8).unwrap();
    check_refused(&path, ErrorCode::Format, &["not valid"]);
}

#[test]
fn tensors_of_no_bytes_and_odd_names_are_fine() {
    let folder = TempDir::new().unwrap();
    let header = r#"{"":{"dtype":"F64","shape":[0,5],"data_offsets":[0,0]},
        "\n\u0000☃":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}"#;
    let path = write_at(&folder, "m.safetensors", &file_bytes(header, 1));
    let model = Model::open(&path).unwrap();
    assert_eq!(names_of(&model), ["", "\n\0☃"]);
    assert_eq!(file_checksum(&model.files()[0], model.tensors()[0].offset, 0).unwrap(), 0);
}

#[test]
fn a_folder_names_its_model() {
    let folder = TempDir::new().unwrap();
    write_model(&folder, "a.safetensors", &["a"]);
    write_model(&folder, ".b.safetensors.partial", &["b"]);
    assert_eq!(names_of(&Model::open(folder.path()).unwrap()), ["a"]);
    write_model(&folder, "c.safetensors", &["c"]);
    check_refused(folder.path(), ErrorCode::Format, &["several", "'a.safetensors'"]);
    write_model(&folder, "model.safetensors", &["m"]);
    assert_eq!(names_of(&Model::open(folder.path()).unwrap()), ["m"]);
    write_index(&folder, &[("a", "a.safetensors"), ("c", "c.safetensors")]);
    assert_eq!(names_of(&Model::open(folder.path()).unwrap()), ["a", "c"]);
}

#[test]
fn indexes_are_checked_against_their_shards() {
    let folder = TempDir::new().unwrap();
    write_model(&folder, "1.safetensors", &["a", "both"]);
    write_model(&folder, "2.safetensors", &["b", "extra"]);
    write_model(&folder, "3.safetensors", &["both"]);
    let check = |entries: &[(&str, &str)], code, words: &[&str]| {
        check_refused(&write_index(&folder, entries), code, words);
    };
    let good = [("a", "1.safetensors"), ("b", "2.safetensors")];
    let model = Model::open(&write_index(&folder, &good)).unwrap();
    assert_eq!(names_of(&model), ["a", "b", "both", "extra"]);
    assert_eq!(model.files().len(), 2);

    use ErrorCode::{Format, Io};
    check(&[good[0], ("x", "2.safetensors")], Format, &["'x'", "'2.safetensors'"]);
    let swapped = [good[0], good[1], ("extra", "1.safetensors")];
    check(&swapped, Format, &["'extra'", "'1.safetensors'", "2.safetensors"]);
    let twice = [good[0], ("both", "3.safetensors")];
    check(&twice, Format, &["'both'", "1.safetensors", "3.safetensors"]);
    check(&[good[0], ("x", "4.safetensors")], Io, &["'x'", "4.safetensors", "No such file"]);
    check(&[good[0], good[0]], Format, &["'a'", "twice"]);
    for outside in ["../1.safetensors", "/etc/passwd", "x/../../1.safetensors", "", "."] {
        check(&[("a", outside)], Format, &["'a'", "inside"]);
    }
    check_refused(&write_at(&folder, INDEX_NAME, b"{\"weight_map\":7}"), Format, &["not an index"]);
}

#[test]
fn a_shard_of_an_index_is_checked_itself() {
    let folder = TempDir::new().unwrap();
    write_model(&folder, "1.safetensors", &["a"]);
    let short = file_bytes(&header_of(&[entry("b", 0, 80)]), 60);
    write_at(&folder, "sub/2.safetensors", &short);
    write_index(&folder, &[("a", "1.safetensors"), ("b", "sub/2.safetensors")]);
    let error = Model::open(folder.path()).unwrap_err();
    check_error(&error, ErrorCode::Format, &["sub/2.safetensors", "'b'", "only 60"]);
}

#[test]
fn a_changed_file_is_told() {
    let folder = TempDir::new().unwrap();
    let check = |words: &[&str], change: &dyn Fn(&Path)| {
        let path = write_model(&folder, "m.safetensors", &["w"]);
        let model = Model::open(&path).unwrap();
        model.check_unchanged().unwrap();
        // Past the tick of the file system's clock.
        std::thread::sleep(Duration::from_millis(20));
        change(&path);
        let error = model.check_unchanged().unwrap_err();
        check_error(&error, ErrorCode::FileChanged, words);
        check_error(&error, ErrorCode::FileChanged, &[path.to_str().unwrap()]);
    };
    check(&["size", "modification"], &|path| {
        File::options().append(true).open(path).unwrap().write_all(b"x").unwrap();
    });
    check(&["modification"], &|path| {
        File::options().write(true).open(path).unwrap().write_all_at(b"x", 40).unwrap();
    });
    check(&["change time"], &|path| {
        // Written, and the modification time put back.
        let file = File::options().write(true).open(path).unwrap();
        let before = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(b"x", 40).unwrap();
        file.set_modified(before).unwrap();
    });
    check(&["modification"], &|path| {
        let file = File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    });
    check(&["change time", "deleted"], &|path| fs::remove_file(path).unwrap());
}

#[test]
fn a_deleted_file_can_still_be_read() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("m.safetensors");
    synthesize(&path, 64 * 1024, 3).unwrap();
    let model = Model::open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    check_bytes(&model, 3);
}

#[test]
fn scenario_38_a_a_file_shorter_than_its_header_says() {
    let folder = TempDir::new().unwrap();
    let entries = [entry("first", 0, 50 * MIB), entry("second", 50 * MIB, 100 * MIB)];
    let path = write_at(&folder, "m.safetensors", &file_bytes(&header_of(&entries), 0));
    let file = File::options().write(true).open(&path).unwrap();
    let header_end = file.metadata().unwrap().len();
    file.set_len(header_end + 60 * MIB).unwrap();
    check_refused(&path, ErrorCode::Format, &["'second'"]);
    file.set_len(header_end + 100 * MIB).unwrap();
    assert_eq!(Model::open(&path).unwrap().total_bytes(), 100 * MIB);
}

#[test]
fn scenario_38_b_a_file_truncated_between_open_and_read() {
    let folder = TempDir::new().unwrap();
    let path = write_model(&folder, "m.safetensors", &["a", "b"]);
    let model = Model::open(&path).unwrap();
    let tensor = model.tensor("b").unwrap();
    let file = &model.files()[tensor.file];
    File::options().write(true).open(&path).unwrap().set_len(tensor.offset + 3).unwrap();

    let mut target = [0; 8];
    let whole = file.read_exact_at(tensor.offset, &mut target).unwrap_err();
    let (front, back) = target.split_at_mut(2);
    let mut parts = [front, back].map(IoSliceMut::new);
    let scattered = file.read_scatter(tensor.offset, &mut parts).unwrap_err();
    let checksum = file_checksum(file, tensor.offset, tensor.bytes).unwrap_err();
    let offset = format!("offset {}", tensor.offset);
    for error in [whole, scattered, checksum] {
        let words = ["m.safetensors", &offset, "wanted 8", "got 3", "unexpected end", "its size"];
        check_error(&error, ErrorCode::FileChanged, &words);
    }
    let named = model.checksum("b").unwrap_err();
    check_error(&named, ErrorCode::FileChanged, &["'b'", "m.safetensors", "unexpected end of"]);
    check_error(&model.check_unchanged().unwrap_err(), ErrorCode::FileChanged, &["size"]);
}

/// A file whose every second read is interrupted, and that gives a byte or three at a time.
struct Interrupting {
    file: File,
    calls: std::sync::atomic::AtomicUsize,
}

impl ReadAt for Interrupting {
    fn read_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let call = self.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if call.is_multiple_of(2) {
            return Err(std::io::Error::from_raw_os_error(libc::EINTR));
        }
        let bytes = target.len().min(1 + call % 3);
        ReadAt::read_at(&self.file, &mut target[..bytes], offset)
    }

    fn identity(&self) -> std::io::Result<FileIdentity> {
        self.file.identity()
    }
}

#[test]
fn scenario_38_c_interrupted_reads_are_retried() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("m.safetensors");
    synthesize(&path, 64 * 1024, 9).unwrap();
    let reader = Interrupting { file: File::open(&path).unwrap(), calls: 0.into() };
    let file = ModelFile::from_reader(Box::new(reader), "interrupted").unwrap();
    let model = Model::from_file(file).unwrap();
    check_bytes(&model, 9);
    let tensor = model.tensors().iter().max_by_key(|tensor| tensor.bytes).unwrap();
    let mut wanted = vec![0; tensor.bytes as usize];
    kernel::pattern(&mut wanted, tensor_seed(9, &tensor.name));
    let mut read = vec![0; wanted.len()];
    let mut parts: Vec<IoSliceMut<'_>> = read.chunks_mut(100).map(IoSliceMut::new).collect();
    model.files()[0].read_scatter(tensor.offset, &mut parts).unwrap();
    assert!(read == wanted);
}

/// Documented answer: refused, as by the format's own crate, however the file is opened.
#[test]
fn scenario_38_d_trailing_bytes_are_refused_in_every_mode() {
    let folder = TempDir::new().unwrap();
    let bytes = file_bytes(&header_of(&[entry("w", 0, 8)]), 9);
    let path = write_at(&folder, "m.safetensors", &bytes);
    let words = ["m.safetensors", "'w'", "1 bytes follow"];
    let by_descriptor = ModelFile::from_fd(File::open(&path).unwrap().into(), "m.safetensors");
    let by_descriptor = Model::from_file(by_descriptor.unwrap()).unwrap_err();
    check_error(&by_descriptor, ErrorCode::Format, &words);
    check_refused(&path, ErrorCode::Format, &words);
    check_error(&Model::open(folder.path()).unwrap_err(), ErrorCode::Format, &words);
    let index = write_index(&folder, &[("w", "m.safetensors")]);
    check_error(&Model::open(&index).unwrap_err(), ErrorCode::Format, &words);
}

#[test]
fn synthetic_models_are_written_once_and_read_back() {
    let folder = TempDir::new().unwrap();
    for (shards, total_bytes) in [(1, 64 * 1024), (1, 12_345_679), (3, 1 << 20), (16, 9_999_999)] {
        let model = SyntheticModel { total_bytes, seed: 5, shards };
        let path = folder.path().join(format!("model-{shards}-{total_bytes}"));
        assert!(!model.is_at(&path));
        let written = model.ensure(&path, &|_| {}).unwrap();
        assert_eq!(written.len(), if shards == 1 { 1 } else { shards as usize + 1 });
        assert!(model.is_at(&path));
        assert!(!SyntheticModel { seed: 6, ..model }.is_at(&path));
        assert!(!SyntheticModel { total_bytes: total_bytes + 1, ..model }.is_at(&path));

        let opened = Model::open(&path).unwrap();
        assert_eq!(opened.total_bytes(), total_bytes);
        assert_eq!(opened.files().len(), shards as usize);
        check_bytes(&opened, 5);
        let before = opened.files()[0].identity().modified;
        model.ensure(&path, &|_| panic!("written again")).unwrap();
        assert_eq!(Model::open(&path).unwrap().files()[0].identity().modified, before);
        File::options().write(true).open(&written[0]).unwrap().set_len(100).unwrap();
        assert!(!model.is_at(&path));
    }
}

#[test]
fn a_failed_write_leaves_nothing() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("m.safetensors");
    let error = synthesize(&path, 1 << 55, 1).unwrap_err();
    check_error(&error, ErrorCode::Io, &["m.safetensors", "free"]);
    let sharded = SyntheticModel { total_bytes: 1 << 55, seed: 1, shards: 2 };
    let error = sharded.write(folder.path(), &|_| {}).unwrap_err();
    check_error(&error, ErrorCode::Io, &["free"]);
    for (total_bytes, shards) in [(100, 1), (1 << 20, 0), (1 << 20, 17)] {
        let model = SyntheticModel { total_bytes, seed: 1, shards };
        let error = model.write(&path, &|_| {}).unwrap_err();
        check_error(&error, ErrorCode::InvalidArgument, &["m.safetensors"]);
    }
    let error = synthesize(folder.path(), 1 << 20, 1).unwrap_err();
    check_error(&error, ErrorCode::InvalidArgument, &["folder"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_writer_that_was_killed_is_followed_and_one_that_runs_is_not_disturbed() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("m.safetensors");
    let partial = write_at(&folder, ".m.safetensors.partial", &[7; 1 << 20]);
    synthesize(&path, 100_000, 1).unwrap();
    check_bytes(&Model::open(&path).unwrap(), 1);
    assert!(!partial.exists());

    let running = File::create(&partial).unwrap();
    running.lock().unwrap();
    let error = synthesize(&path, 100_000, 2).unwrap_err();
    check_error(&error, ErrorCode::Io, &["m.safetensors", "another process"]);
    assert!(partial.exists());
    check_bytes(&Model::open(&path).unwrap(), 1);
}

#[test]
fn only_synthetic_models_are_replaced_and_other_files_by_force() {
    let folder = TempDir::new().unwrap();
    let synthetic = |shards| SyntheticModel { total_bytes: 100_000, seed: 1, shards };
    let path = write_model(&folder, "m.safetensors", &["mine"]);
    let before = fs::read(&path).unwrap();
    let refused = |shards, path: &Path, words: &[&str]| {
        let error = synthetic(shards).ensure(path, &|_| {}).unwrap_err();
        check_error(&error, ErrorCode::InvalidArgument, words);
        error
    };
    refused(1, &path, &["m.safetensors", "--force"]);
    assert_eq!(fs::read(&path).unwrap(), before);
    synthetic(1).overwrite(&path, &|_| {}).unwrap();
    check_bytes(&Model::open(&path).unwrap(), 1);
    // Its like goes unasked, also one that was cut short.
    File::options().write(true).open(&path).unwrap().set_len(90_000).unwrap();
    synthesize(&path, 200_000, 2).unwrap();
    check_bytes(&Model::open(&path).unwrap(), 2);

    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let null = Path::new("/dev/null");
    for (place, word) in [(&*link, "link"), (&*pipe, "pipe"), (null, "device")] {
        refused(1, place, &[word, place.to_str().unwrap()]);
        let error = synthetic(1).overwrite(place, &|_| {}).unwrap_err();
        check_error(&error, ErrorCode::InvalidArgument, &[word]);
    }
    assert!(link.is_symlink() && Model::open(&link).unwrap().total_bytes() == 200_000);
    refused(2, &path, &["a file is in the place of the folder"]);
    std::os::unix::fs::symlink(&path, folder.path().join(".new.partial")).unwrap();
    refused(1, &folder.path().join("new"), &[".new.partial", "link"]);
    let nowhere = folder.path().join("no/m.safetensors");
    let error = synthesize(&nowhere, 100_000, 1).unwrap_err();
    check_error(&error, ErrorCode::Io, &["the folder", "does not exist"]);
}

#[test]
fn an_index_of_other_shards_is_kept() {
    let folder = TempDir::new().unwrap();
    let synthetic = SyntheticModel { total_bytes: 100_000, seed: 1, shards: 2 };
    let written = synthetic.write(folder.path(), &|_| {}).unwrap();
    let other = SyntheticModel { seed: 2, ..synthetic };
    other.write(folder.path(), &|_| {}).unwrap();
    let index = fs::read(&written[0]).unwrap();
    // A shard of someone else's: neither it nor the index goes, by their names alone.
    fs::remove_file(&written[2]).unwrap();
    let shard = written[2].file_name().unwrap().to_str().unwrap();
    write_model(&folder, shard, &["mine"]);
    let error = synthetic.write(folder.path(), &|_| {}).unwrap_err();
    check_error(&error, ErrorCode::InvalidArgument, &[INDEX_NAME, "--force"]);
    assert_eq!(fs::read(&written[0]).unwrap(), index);
    synthetic.overwrite(folder.path(), &|_| {}).unwrap();
    assert!(synthetic.is_at(folder.path()));
}

/// What a page holds when its segments are read is what the tensors in it hold.
#[test]
fn a_laid_out_model_is_found_page_by_page() {
    let folder = TempDir::new().unwrap();
    let written = SyntheticModel { total_bytes: 3_000_001, seed: 4, shards: 2 };
    written.write(folder.path(), &|_| {}).unwrap();
    let model = Model::open(folder.path()).unwrap();
    let page_size = PageSize::new(64 * 1024).unwrap();
    let layout = lay_out(&model.layout_items(), page_size, 0).unwrap();
    assert!(layout.end < model.total_bytes() * 106 / 100);

    let page_count = page_size.pages_for(layout.end);
    let mut memory = vec![0; (page_count * page_size.bytes()) as usize];
    for page in (0..page_count).rev() {
        let start = page * page_size.bytes();
        for segment in layout.binding.segments_of(start..start + page_size.bytes()) {
            let target = segment.target.start as usize..segment.target.end as usize;
            let file = &model.files()[segment.file];
            file.read_exact_at(segment.source_offset, &mut memory[target]).unwrap();
        }
    }
    for (tensor, place) in model.tensors().iter().zip(&layout.places) {
        let bytes = &memory[place.start as usize..place.end as usize];
        let mut wanted = vec![0; bytes.len()];
        kernel::pattern(&mut wanted, tensor_seed(4, &tensor.name));
        assert!(bytes == wanted, "{} differs", tensor.name);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn damaged_models_open_or_are_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let folder = TempDir::new().unwrap();
        let header = header_of(&[entry("layers.0.w", 0, 8), entry("layers.1.w", 8, 40)]);
        let mut bytes = file_bytes(&header, 40);
        for (position, byte) in changes {
            let position = position.index(bytes.len());
            bytes[position] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let path = write_at(&folder, "m.safetensors", &bytes);
        match Model::open(&path) {
            Ok(model) => {
                for tensor in model.tensors() {
                    file_checksum(&model.files()[0], tensor.offset, tensor.bytes).unwrap();
                }
            }
            Err(error) => {
                prop_assert!(matches!(error.code(), ErrorCode::Format | ErrorCode::Io));
                prop_assert!(error.to_string().contains("m.safetensors"), "{}", error);
            }
        }
    }
}
