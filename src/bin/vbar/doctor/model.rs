//! What a model lies on: size, file system, free space, direct reads and how fast they are,
//! registered pages.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use vbar::host::file_system::{FileSystem, FileSystemKind};
use vbar::host::model_files::Model;
use vbar::host::mounts::SystemRoot;
use vbar::host::source::ModelFile;
use vbar::units::format_bytes;
use vbar::{Error, ErrorCode, Result};

use super::disk::{self, Disk};
use super::line::Line;

/// The serialized fields are part of the program's interface.
#[derive(Serialize, Clone, PartialEq, Debug)]
pub(super) struct ModelFacts {
    name: String,
    model_bytes: u64,
    tensor_count: usize,
    files: Vec<FileFacts>,
}

#[derive(Serialize, Clone, PartialEq, Debug)]
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
    /// Null where it was not measured.
    disk: Option<Disk>,
}

impl ModelFacts {
    /// `measured_for`: how long each file's disk is read for, if it is.
    pub(super) fn read(
        model: &Model,
        root: &SystemRoot,
        measured_for: Option<Duration>,
    ) -> Result<Self> {
        let files = model.files().iter().map(|file| FileFacts::read(file, root, measured_for));
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
            lines.extend(file.disk.map(|disk| disk.line()));
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
    fn read(file: &ModelFile, root: &SystemRoot, measured_for: Option<Duration>) -> Result<Self> {
        let descriptor = file.descriptor().ok_or_else(|| {
            Error::new(ErrorCode::Internal, format!("{}: has no descriptor", file.name()))
        })?;
        let found = FileSystem::of(descriptor, root).map_err(|error| error.context(file.name()))?;
        let direct_error = direct_read(descriptor).err();
        let disk = match measured_for {
            Some(patience) if direct_error.is_none() => {
                let disk = Disk::measure(descriptor, file.bytes(), patience);
                disk.map_err(|error| Error::io(file.name(), &error))?
            }
            _ => None,
        };
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
            direct_error: direct_error.map(|error| error.to_string()),
            disk,
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

/// Reads the beginning of the file past the page cache.
fn direct_read(descriptor: BorrowedFd<'_>) -> std::io::Result<()> {
    let (mut memory, start) = disk::aligned(disk::ALIGNMENT);
    let target = &mut memory[start..start + disk::ALIGNMENT];
    disk::open_direct(descriptor)?.read_at(target, 0).map(drop)
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
            disk: None,
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
