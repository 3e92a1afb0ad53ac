//! Ranges that threads write and the library saves: brought back, dropped, written anew.

use vbar::driver::KernelCall;
use vbar::units::{Generation, Stream};
use vbar::{Allocation, ErrorCode, Fault, Result};

use super::worker::Worker;
use super::world::{BARE_COUNT, Bare, pattern_checksum};

/// What was saved of a range.
pub(super) struct Saved {
    checksum: u64,
    /// The stream that wrote it, which lasts, and the generations that its pages had then: of those
    /// that still have them, a reader on another stream waits for it.
    writer: Stream,
    written: Vec<Generation>,
}

impl Worker<'_> {
    /// A range that is saved: checked, dropped, or written and saved again.
    pub(super) fn use_saved(&mut self) -> Result<()> {
        let (number, drawn) = (self.choice.index(BARE_COUNT), self.choice.next());
        let stream = self.lasting_stream();
        let (rewrites, drops) = (self.choice.one_in(4), self.choice.one_in(16));
        let bare = self.world.bare(number);
        if bare.kept.is_empty() {
            return Ok(());
        }
        let index = (drawn % bare.kept.len() as u64) as usize;
        self.tell(|| {
            format!("saved range {index} of VBAR {number}, drop {drops}, write {rewrites}")
        });
        let _usage = bare.usage.0.read();
        let (allocation, content) = &bare.kept[index];
        // Held to the end: a later writer comes after this thread on the host, and so on the
        // device.
        let mut content = content.lock();
        if drops {
            *content = None;
            return bare.vbar.drop_save(allocation.range());
        }
        match &*content {
            Some(saved) if !rewrites => self.check_saved(&bare, allocation, saved, stream),
            _ => self.write_saved(&bare, allocation, &mut content, stream),
        }
    }

    fn check_saved(
        &mut self,
        bare: &Bare,
        allocation: &Allocation,
        saved: &Saved,
        stream: Stream,
    ) -> Result<()> {
        let Fault::Resident(guard) = bare.vbar.fault(allocation.range(), stream)? else {
            return Ok(());
        };
        let is_kept = guard.signature().iter().zip(&saved.written).any(|(now, then)| now == then);
        if is_kept && saved.writer != stream {
            self.world.runtime.device().driver.stream_synchronize(saved.writer)?;
        }
        let address = guard.address();
        let what = || format!("saved bytes at {address}");
        self.checks.launch(address, guard.bytes(), saved.checksum, stream, what)?;
        guard.unpin()
    }

    fn write_saved(
        &mut self,
        bare: &Bare,
        allocation: &Allocation,
        content: &mut Option<Saved>,
        stream: Stream,
    ) -> Result<()> {
        let (vbar, range) = (&bare.vbar, allocation.range());
        let Fault::Resident(guard) = vbar.fault(range.clone(), stream)? else { return Ok(()) };
        *content = None;
        vbar.drop_save(range.clone())?;
        match vbar.prepare_save(range.clone()) {
            // The host has no memory to lock: that is no fault of anybody's.
            Err(error) if error.code() == ErrorCode::HostMemory => return Ok(()),
            prepared => prepared?,
        }
        // Whoever has read the old bytes is done.
        let driver = &self.world.runtime.device().driver;
        driver.ctx_synchronize()?;
        let (seed, target, bytes) = (self.world.new_version(), guard.address(), guard.bytes());
        let call = KernelCall::Pattern { target, bytes, seed, delay_nanos: 0 };
        driver.launch_kernel(call, stream)?;
        match vbar.save(range.clone(), stream) {
            Ok(()) => {
                let (checksum, writer) = (pattern_checksum(seed, bytes), stream);
                *content = Some(Saved { checksum, writer, written: guard.signature().to_vec() });
                guard.unpin()
            }
            Err(error) => vbar.drop_save(range).and(Err(error)),
        }
    }
}
