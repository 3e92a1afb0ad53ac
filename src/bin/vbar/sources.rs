//! Where the bytes of fills came from, for reports.

use serde::Serialize;
use vbar::counters::SourceBytes;
use vbar::units::format_bytes;

/// Bytes by source. The serialized fields are part of the program's interface.
#[derive(Serialize, Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Sources {
    locked_cache_bytes: u64,
    registered_bytes: u64,
    page_cache_bytes: u64,
    disk_bytes: u64,
    /// Of `disk_bytes`, those that went past the page cache.
    direct_bytes: u64,
}

impl From<SourceBytes> for Sources {
    fn from(bytes: SourceBytes) -> Self {
        let SourceBytes { locked_cache_bytes, registered_bytes, .. } = bytes;
        let SourceBytes { page_cache_bytes, disk_bytes, direct_bytes, .. } = bytes;
        Self { locked_cache_bytes, registered_bytes, page_cache_bytes, disk_bytes, direct_bytes }
    }
}

impl Sources {
    /// For people: those that gave bytes.
    pub(crate) fn text(&self) -> String {
        let all = [
            ("page-locked cache", self.locked_cache_bytes),
            ("registered", self.registered_bytes),
            ("page cache", self.page_cache_bytes),
            ("disk", self.disk_bytes - self.direct_bytes),
            ("disk past the page cache", self.direct_bytes),
        ];
        let told = all.iter().filter(|(_, bytes)| *bytes > 0);
        let told: Vec<String> =
            told.map(|(name, bytes)| format!("{name} {}", format_bytes(*bytes))).collect();
        if told.is_empty() { "none".to_owned() } else { told.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_told_where_they_gave_bytes() {
        let sources = Sources { disk_bytes: 3 << 20, direct_bytes: 1 << 20, ..Sources::default() };
        assert_eq!(sources.text(), "disk 2.0 MiB, disk past the page cache 1.0 MiB");
        assert_eq!(Sources::default().text(), "none");
    }
}
