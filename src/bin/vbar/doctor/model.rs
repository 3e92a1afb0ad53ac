//! What a model lies on: size, file system, free space, direct reads, registered pages.

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use serde::Serialize;
use vbar::host::file_system::{FileSystem, FileSystemKind};
use vbar::host::model_files::Model;
use vbar::host::mounts::SystemRoot;
use vbar::host::source::ModelFile;
use vbar::units::format_bytes;
use vbar::{Error, ErrorCode, Result};

use super::line::Line;

/// Direct reads of that many bytes, and at addresses that are multiples, suit every disk.
const DIRECT_BYTES: usize = 4096;

/// The serialized fields are part of the program's interface.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct ModelFacts {
    name: String,
    model_bytes: u64,
    tensor_count: usize,
    files: Vec<FileFacts>,
}

#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
struct FileFacts {
    path: String,
    bytes: u64,
    file_system: String,
    kind: &'static str,
    mount_point: Option<PathBuf>,
    free_bytes: u64,
    dax: bool,
    /// Null where `O_DIRECT` works, else why not.
    direct_error: Option<String>,
    may_be_registered: bool,
}

impl ModelFacts {
    pub(super) fn read(model: &Model, root: &SystemRoot) -> Result<Self> {
        let files = model.files().iter().map(|file| FileFacts::read(file, root));
        Ok(Self {
            name: model.name().to_owned(),
            model_bytes: model.total_bytes(),
            tensor_count: model.tensors().len(),
            files: files.collect::<Result<_>>()?,
        })
    }

    pub(super) fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Files on one file system share their lines.
    pub(super) fn lines(&self, free_bytes: Option<u64>, allowance_bytes: Option<u64>) -> Vec<Line> {
        let mut lines = vec![self.size(free_bytes, allowance_bytes)];
        let mut told: Vec<&FileFacts> = Vec::new();
        for file in &self.files {
            if told.iter().any(|other| file.is_like(other)) {
                continue;
            }
            told.push(file);
            lines.extend([file.place(), file.direct(), file.registration()]);
        }
        lines
    }

    fn size(&self, free_bytes: Option<u64>, allowance_bytes: Option<u64>) -> Line {
        let files = if self.files.len() == 1 { "file" } else { "files" };
        let mut text = format!(
            "{} in {} tensors, {} {files}",
            format_bytes(self.model_bytes),
            self.tensor_count,
            self.files.len()
        );
        let streamed = free_bytes.map(|free| self.model_bytes.saturating_sub(free));
        match (streamed, allowance_bytes) {
            (Some(0), _) => text.push_str("; fits into the device's free memory"),
            (Some(streamed), Some(allowance)) => {
                let what = format_bytes(streamed);
                let fits = if streamed <= allowance { "fits" } else { "does not fit" };
                text.push_str(&format!(
                    "; {what} do not fit the device and are streamed, which {fits} the RAM \
                     allowance"
                ));
            }
            _ => {}
        }
        Line::ok("model", text)
    }
}

impl FileFacts {
    fn read(file: &ModelFile, root: &SystemRoot) -> Result<Self> {
        let descriptor = file.descriptor().ok_or_else(|| {
            Error::new(ErrorCode::Internal, format!("{}: has no descriptor", file.name()))
        })?;
        let found = FileSystem::of(descriptor, root).map_err(|error| error.context(file.name()))?;
        Ok(Self {
            path: file.name().to_owned(),
            bytes: file.bytes(),
            kind: match found.kind {
                FileSystemKind::Local => "local",
                FileSystemKind::Memory => "memory",
                FileSystemKind::Network => "network",
                FileSystemKind::UserSpace => "user space",
                FileSystemKind::Layered => "layered",
                FileSystemKind::Other => "unknown",
            },
            direct_error: direct_read(descriptor).err().map(|error| error.to_string()),
            may_be_registered: found.may_be_registered(),
            file_system: found.name,
            mount_point: found.point,
            free_bytes: found.free_bytes,
            dax: found.dax,
        })
    }

    /// Whether both have the same lines.
    fn is_like(&self, other: &Self) -> bool {
        self.file_system == other.file_system
            && self.mount_point == other.mount_point
            && self.dax == other.dax
            && self.direct_error == other.direct_error
    }

    fn place(&self) -> Line {
        const TOPIC: &str = "file system";
        let at = self.mount_point.as_ref();
        let at = at.map_or(String::new(), |point| format!(" at {}", point.display()));
        let text = format!("{}{at}, {} free", self.file_system, format_bytes(self.free_bytes));
        match self.kind {
            "network" => Line::note(
                TOPIC,
                format!("{text}: read over a network or from a host"),
                "copy the model to a disk of this machine where it is read again and again",
            ),
            "user space" => Line::note(
                TOPIC,
                format!("{text}: a program (FUSE) answers every read"),
                "copy the model to a disk of this machine",
            ),
            "layered" => Line::note(
                TOPIC,
                format!("{text}: layers of a container's image"),
                "mount the model into the container as a volume",
            ),
            "memory" => Line::ok(TOPIC, format!("{text}; it takes RAM itself")),
            "unknown" => Line::note(
                TOPIC,
                format!("{text}: not known to vbar"),
                "nothing to do where reading is fast; else copy the model to ext4, xfs or btrfs",
            ),
            _ => Line::ok(TOPIC, text),
        }
    }

    fn direct(&self) -> Line {
        const TOPIC: &str = "O_DIRECT";
        match &self.direct_error {
            None => Line::ok(TOPIC, "works: a model larger than RAM can be read past the cache"),
            Some(why) => Line::note(
                TOPIC,
                format!("refused: {why}"),
                "nothing to do: files are read through the page cache instead",
            ),
        }
    }

    fn registration(&self) -> Line {
        const TOPIC: &str = "page cache";
        if self.may_be_registered {
            return Line::ok(TOPIC, format!("{} is on the list for registering", self.file_system));
        }
        let why = if self.dax { " with DAX" } else { "" };
        Line::note(
            TOPIC,
            format!("{}{why} is not on the list for registering", self.file_system),
            "nothing to do: files are read into page-locked memory instead",
        )
    }
}

/// Opens the file once more, past the page cache, and reads its beginning. It is opened by its
/// descriptor: its name may be that of another file by now.
fn direct_read(descriptor: BorrowedFd<'_>) -> std::io::Result<()> {
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(direct).open(path)?;
    let mut memory = vec![0; 2 * DIRECT_BYTES];
    let start = memory.as_ptr().align_offset(DIRECT_BYTES);
    file.read_at(&mut memory[start..start + DIRECT_BYTES], 0)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::line::Level;
    use super::*;

    fn file(name: &str, kind: &'static str) -> FileFacts {
        FileFacts {
            path: "/models/m.safetensors".to_owned(),
            bytes: 1000,
            file_system: name.to_owned(),
            kind,
            mount_point: Some("/models".into()),
            free_bytes: 1 << 30,
            dax: false,
            direct_error: None,
            may_be_registered: name == "ext4",
        }
    }

    fn facts(files: Vec<FileFacts>) -> ModelFacts {
        ModelFacts { name: "m".to_owned(), model_bytes: 1000, tensor_count: 5, files }
    }

    #[test]
    fn files_on_one_file_system_share_their_lines() {
        let two =
            facts(vec![file("ext4", "local"), file("ext4", "local"), file("nfs4", "network")]);
        let lines = two.lines(Some(400), Some(10_000));
        let topics: Vec<_> = lines.iter().map(|line| (&*line.topic, line.verdict)).collect();
        assert_eq!(topics.len(), 7, "{lines:?}");
        assert_eq!(topics[1], ("file system", Level::Ok));
        assert_eq!(topics[4], ("file system", Level::Note));
        assert!(lines[0].text.contains("600 B do not fit the device"), "{lines:?}");
        assert!(lines[0].text.contains("which fits the RAM allowance"), "{lines:?}");
        assert!(lines[1].text.starts_with("ext4 at /models, 1.0 GiB free"), "{lines:?}");
    }

    #[test]
    fn what_is_slow_or_strange_is_noted() {
        for (kind, text) in [
            ("network", "over a network"),
            ("user space", "FUSE"),
            ("layered", "image"),
            ("unknown", "not known"),
        ] {
            let line = file("x", kind).place();
            assert_eq!(line.verdict, Level::Note);
            assert!(line.text.contains(text), "{line:?}");
        }
        assert_eq!(file("tmpfs", "memory").place().verdict, Level::Ok);
        let refused = FileFacts { direct_error: Some("why".into()), ..file("x", "local") };
        assert_eq!(refused.direct().text, "refused: why");
        let dax = FileFacts { dax: true, may_be_registered: false, ..file("ext4", "local") };
        assert_eq!(dax.registration().text, "ext4 with DAX is not on the list for registering");
        let fits = facts(vec![]).lines(Some(1000), None);
        assert!(fits[0].text.ends_with("fits into the device's free memory"), "{fits:?}");
    }
}
