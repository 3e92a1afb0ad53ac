//! Reads that are interrupted, short, failing or cut off.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::*;
use crate::host::reading::Reading;

/// One answer of the injected reader.
enum Answer {
    /// Bytes as they are, but at most so many.
    AtMost(usize),
    /// An errno.
    Fails(i32),
}

/// Bytes of memory, read by a script; past its end, reads are whole.
struct Scripted {
    bytes: Vec<u8>,
    script: Mutex<VecDeque<Answer>>,
}

impl Scripted {
    fn next(&self, wanted: usize, offset: u64) -> io::Result<&[u8]> {
        let rest = &self.bytes[(offset as usize).min(self.bytes.len())..];
        let at_most = match self.script.lock().pop_front() {
            Some(Answer::Fails(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(Answer::AtMost(bytes)) => bytes,
            None => usize::MAX,
        };
        Ok(&rest[..rest.len().min(at_most).min(wanted)])
    }
}

impl ReadAt for Scripted {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let bytes = self.next(target.len(), offset)?;
        target[..bytes.len()].copy_from_slice(bytes);
        Ok(bytes.len())
    }

    fn read_vectored_at(&self, targets: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        assert!(targets.len() <= TARGETS_A_CALL_MAX);
        let bytes = self.next(targets.iter().map(|target| target.len()).sum(), offset)?;
        let mut rest = bytes;
        for target in targets {
            let (now, later) = rest.split_at(rest.len().min(target.len()));
            target[..now.len()].copy_from_slice(now);
            rest = later;
        }
        Ok(bytes.len())
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        Ok(FileIdentity { bytes: self.bytes.len() as u64, ..FileIdentity::default() })
    }
}

fn bytes_of(count: usize) -> Vec<u8> {
    (0..count).map(|index| (index * 7 + index / 256) as u8).collect()
}

fn scripted(count: usize, script: impl IntoIterator<Item = Answer>) -> ModelFile {
    let script = Mutex::new(script.into_iter().collect());
    ModelFile::from_reader(Box::new(Scripted { bytes: bytes_of(count), script }), "scripted")
        .unwrap()
}

/// Both kinds of read give the bytes from 10 on.
fn check_reads(script: impl Fn() -> Vec<Answer>) {
    let wanted = &bytes_of(3000)[10..2900];
    let mut whole = vec![0; wanted.len()];
    scripted(3000, script()).read_exact_at(10, &mut whole).unwrap();
    assert!(whole == wanted);

    let mut parts = vec![0; wanted.len()];
    let (a, rest) = parts.split_at_mut(1);
    let (b, c) = rest.split_at_mut(500);
    let mut targets = [&mut [][..], a, &mut [], b, c, &mut []].map(IoSliceMut::new);
    scripted(3000, script()).read_scatter(10, &mut targets).unwrap();
    assert!(parts == wanted);
}

/// Both kinds of read of 100 bytes at `offset` fail with `Io` and all of `words`.
fn check_fails(count: usize, offset: u64, script: impl Fn() -> Vec<Answer>, words: &[&str]) {
    let mut buffer = [0; 100];
    let whole = scripted(count, script()).read_exact_at(offset, &mut buffer);
    let (a, b) = buffer.split_at_mut(60);
    let mut targets = [a, b].map(IoSliceMut::new);
    let parts = scripted(count, script()).read_scatter(offset, &mut targets);
    for error in [whole.unwrap_err(), parts.unwrap_err()] {
        assert_eq!(error.code(), ErrorCode::Io);
        let text = error.to_string();
        for word in words.iter().chain(&["scripted", "wanted 100"]) {
            assert!(text.contains(word), "no {word} in: {text}");
        }
    }
}

#[test]
fn interrupted_and_short_reads_go_on() {
    use Answer::{AtMost, Fails};
    check_reads(Vec::new);
    check_reads(|| vec![AtMost(1), AtMost(499), AtMost(2), AtMost(1000)]);
    check_reads(|| vec![Fails(libc::EINTR), Fails(libc::EINTR), AtMost(700), Fails(libc::EINTR)]);
}

#[test]
fn failures_say_where() {
    use Answer::{AtMost, Fails};
    let eio = || vec![AtMost(30), Fails(libc::EINTR), Fails(libc::EIO)];
    check_fails(1000, 5, eio, &["offset 5", "got 30", "os error 5"]);
    check_fails(80, 0, Vec::new, &["offset 0", "got 80", "unexpected end"]);
    check_fails(80, 80, Vec::new, &["offset 80", "got 0", "unexpected end"]);
    check_fails(80, u64::MAX - 20, Vec::new, &["got 0", "unexpected end"]);
}

#[test]
fn thousands_of_targets_are_filled() {
    let wanted = bytes_of(6000);
    let mut read = vec![0; wanted.len()];
    let mut targets: Vec<IoSliceMut<'_>> = read.chunks_mut(2).map(IoSliceMut::new).collect();
    scripted(6000, []).read_scatter(0, &mut targets).unwrap();
    assert!(read == wanted);
}

#[test]
fn nothing_is_read_for_no_bytes() {
    let file = scripted(0, [Answer::Fails(libc::EIO)]);
    file.read_exact_at(u64::MAX, &mut []).unwrap();
    file.read_scatter(u64::MAX, &mut []).unwrap();
    file.read_scatter(0, &mut [IoSliceMut::new(&mut [])]).unwrap();
}

#[test]
fn a_difference_is_named() {
    let before = FileIdentity { bytes: 10, inode: 3, ..FileIdentity::default() };
    assert_eq!(before.difference(&before), None);
    let shorter = FileIdentity { bytes: 4, ..before };
    assert!(before.difference(&shorter).unwrap().contains("10 to 4"));
    let other = FileIdentity { inode: 4, ..before };
    assert!(before.difference(&other).unwrap().contains("another file"));
}

/// Bytes of memory of which those before `cached` need no disk.
struct Halfway {
    bytes: Vec<u8>,
    cached: usize,
}

impl ReadAt for Halfway {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        target.copy_from_slice(&self.bytes[offset as usize..offset as usize + target.len()]);
        Ok(target.len())
    }

    fn read_cached_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let there = self.cached.saturating_sub(offset as usize).min(target.len());
        match there {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => self.read_at(&mut target[..there], offset),
        }
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        Ok(FileIdentity { bytes: self.bytes.len() as u64, ..FileIdentity::default() })
    }
}

#[track_caller]
fn check_before_disk(reading: Reading, read: std::ops::Range<usize>, disk: u64) {
    let bytes = bytes_of(1000);
    let reader = Box::new(Halfway { bytes: bytes.clone(), cached: 600 });
    let file = ModelFile::from_reader(reader, "halfway").unwrap();
    let (mut target, mut calls) = (vec![0; read.len()], 0);
    let found = file.read_by(reading, read.start as u64, &mut target, || calls += 1).unwrap();
    assert_eq!(target, bytes[read.clone()]);
    assert_eq!((found.disk, found.page_cache), (disk, read.len() as u64 - disk));
    assert_eq!(calls, u32::from(disk > 0), "{read:?}");
}

#[test]
fn a_read_that_will_wait_for_the_disk_says_so_before() {
    check_before_disk(Reading::Cached, 0..600, 0);
    check_before_disk(Reading::Cached, 100..500, 0);
    check_before_disk(Reading::Cached, 500..700, 100);
    check_before_disk(Reading::Cached, 600..1000, 400);
    // Past the page cache is refused here, so it is read through it.
    check_before_disk(Reading::CachedOrDirect, 500..700, 100);
}
