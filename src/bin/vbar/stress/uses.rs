//! Operations that use memory: fault, write, commit, check, unpin.

use std::sync::atomic::Ordering;

use vbar::driver::KernelCall;
use vbar::driver::kernel::checksum;
use vbar::runtime::FillGuard;
use vbar::units::{DeviceAddress, Stream};
use vbar::{AllocationFault, Fault, Guard, Result};

use super::choice::Choice;
use super::worker::{HeldAt, Worker};
use super::world::{BARE_COUNT, Bare, Content, Piece, World, pattern_checksum};

/// How a fill ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FillEnd {
    Commit,
    /// Given up before anything was written.
    DropEarly,
    /// Given up after it was written.
    DropLate,
}

impl FillEnd {
    fn draw(choice: &mut Choice) -> Self {
        match choice.below(12) {
            0 => Self::DropEarly,
            1 => Self::DropLate,
            _ => Self::Commit,
        }
    }
}

impl Worker<'_> {
    /// An allocation of a bare VBAR: checked when it is resident, else written and committed.
    pub(super) fn use_piece(&mut self) -> Result<()> {
        let (number, drawn) = (self.choice.index(BARE_COUNT), self.choice.next());
        let stream = self.lasting_stream();
        let (waits, holds) = (self.choice.one_in(4), self.choice.one_in(8));
        let end = FillEnd::draw(&mut self.choice);
        let forgets = self.choice.one_in(4);
        let bare = self.world.bare(number);
        let index = (drawn % bare.pieces.len() as u64) as usize;
        self.tell(|| format!("allocation {index} of VBAR {number} on {stream:?}, {end:?}"));
        let epoch = bare.usage.0.read();
        let piece = &bare.pieces[index];
        let fault = match waits {
            true => piece.allocation.fault_wait(stream)?,
            false => piece.allocation.fault(stream)?,
        };
        match fault {
            AllocationFault::Resident(guard) => self.check_piece(piece, &guard, stream)?,
            AllocationFault::Refill(fill) => return self.fill(&bare, piece, fill, stream, end),
            AllocationFault::Offloaded(_) | AllocationFault::Busy => return Ok(()),
        }
        if holds && let AllocationFault::Resident(guard) = piece.allocation.fault(stream)? {
            let version = piece.content.lock().version;
            let at = match forgets {
                true => HeldAt::Forgotten,
                false => HeldAt::Piece { bare: bare.clone(), index, version, epoch: *epoch },
            };
            self.hold(guard, stream, at);
        }
        Ok(())
    }

    /// A resident allocation must have the bytes that were committed last.
    fn check_piece(&mut self, piece: &Piece, guard: &Guard<'_>, stream: Stream) -> Result<()> {
        let address = guard.address();
        let expected = {
            let content = piece.content.lock();
            if content.version.is_none() {
                let text = format!("{address}: resident, and nothing was committed");
                self.world.journal.violation(text);
                return Ok(());
            }
            if content.signature != guard.signature() {
                let text = format!(
                    "{address}: resident with signature {:?}, committed with {:?}",
                    guard.signature(),
                    content.signature
                );
                self.world.journal.violation(text);
            }
            content.checksum
        };
        let what = || format!("resident allocation at {address}");
        self.checks.launch(address, guard.bytes(), expected, stream, what)
    }

    /// Writes an allocation. The lock on its content is held until it is clear whether the bytes
    /// are good: a later writer comes after this one on the host, and so on the device.
    fn fill(
        &mut self,
        bare: &Bare,
        piece: &Piece,
        fill: FillGuard<'_>,
        stream: Stream,
        end: FillEnd,
    ) -> Result<()> {
        let (address, bytes) = (fill.address(), fill.bytes());
        if piece.filling.swap(true, Ordering::AcqRel) {
            self.world.journal.violation(format!("{address}: two fill at a time"));
        }
        let mut content = piece.content.lock();
        check_that_bytes_were_lost(self.world, bare, piece, &content, stream);
        *content = Content::default();
        let driver = &self.world.runtime.device().driver;
        let version = self.world.new_version();
        let mut written = Ok(());
        if end != FillEnd::DropEarly {
            let call =
                KernelCall::Pattern { target: address, bytes, seed: version, delay_nanos: 0 };
            written = driver.launch_kernel(call, stream);
        }
        if end != FillEnd::Commit || written.is_err() {
            // Whoever fills next may do so on another stream.
            driver.stream_synchronize(stream)?;
            piece.filling.store(false, Ordering::Release);
            drop(fill);
            return Ok(written?);
        }
        piece.filling.store(false, Ordering::Release);
        match fill.commit(stream) {
            Ok(guard) => {
                let (version, checksum) = (Some(version), pattern_checksum(version, bytes));
                let signature = guard.signature().to_vec();
                *content = Content { version, checksum, signature };
                drop(content);
                let what = || format!("allocation at {address}, just written");
                self.checks.launch(address, bytes, checksum, stream, what)
            }
            Err(error) => {
                driver.stream_synchronize(stream)?;
                Err(error)
            }
        }
    }

    /// A tensor, whole.
    pub(super) fn use_tensor(&mut self) -> Result<()> {
        let tensor = self.choice.index(self.world.tensors.len());
        let stream = self.lasting_stream();
        let (holds, forgets) = (self.choice.one_in(8), self.choice.one_in(4));
        self.tell(|| format!("tensor {tensor} on {stream:?}"));
        let bound = self.world.bound();
        let epoch = bound.usage.0.read();
        let Fault::Resident(guard) = bound.bar.fault(tensor, stream)? else { return Ok(()) };
        self.check_tensor(guard.address(), tensor, stream)?;
        if holds && let Fault::Resident(second) = bound.bar.fault(tensor, stream)? {
            let at = match forgets {
                true => HeldAt::Forgotten,
                false => HeldAt::Tensor { bound: bound.clone(), tensor, epoch: *epoch },
            };
            self.hold(second, stream, at);
        }
        guard.unpin()
    }

    /// A pinned tensor must have its bytes.
    pub(super) fn check_tensor(
        &mut self,
        address: DeviceAddress,
        tensor: usize,
        stream: Stream,
    ) -> Result<()> {
        let (bytes, checksum) = &self.world.tensors[tensor];
        let what = || format!("tensor {tensor} at {address}");
        self.checks.launch(address, bytes.len() as u64, *checksum, stream, what)
    }

    /// Some bytes of a tensor.
    pub(super) fn use_part(&mut self) -> Result<()> {
        let tensor = self.choice.index(self.world.tensors.len());
        let (first, second) = (self.choice.next(), self.choice.next());
        let stream = self.any_stream();
        let bytes = &self.world.tensors[tensor].0;
        let start = (first % (bytes.len() as u64 + 1) / 8 * 8) as usize;
        let end = start + (second % ((bytes.len() - start) as u64 + 1)) as usize;
        self.tell(|| format!("bytes {start}..{end} of tensor {tensor} on {stream:?}"));
        let bound = self.world.bound();
        let _usage = bound.usage.0.read();
        let place = bound.bar.range(tensor).start;
        let range = place + start as u64..place + end as u64;
        let Fault::Resident(guard) = bound.bar.vbar().fault(range, stream)? else { return Ok(()) };
        let expected = checksum(&bytes[start..end], 0);
        let what = || format!("bytes {start}..{end} of tensor {tensor}");
        self.checks.launch(guard.address(), guard.bytes(), expected, stream, what)
    }

    /// Ranges of several VBARs, all or none.
    pub(super) fn use_many(&mut self) -> Result<()> {
        let tensors: Vec<usize> = (0..1 + self.choice.index(3))
            .map(|_| self.choice.index(self.world.tensors.len()))
            .collect();
        let (number, drawn) = (self.choice.index(BARE_COUNT), self.choice.next());
        let stream = self.any_stream();
        self.tell(|| format!("tensors {tensors:?} and VBAR {number} on {stream:?}"));
        let (bound, bare) = (self.world.bound(), self.world.bare(number));
        let _usages = (bound.usage.0.read(), bare.usage.0.read());
        let piece = &bare.pieces[(drawn % bare.pieces.len() as u64) as usize];
        let places = tensors.iter().map(|tensor| (bound.bar.vbar(), bound.bar.range(*tensor)));
        let ranges: Vec<_> = places.chain([(&bare.vbar, piece.allocation.range())]).collect();
        let Fault::Resident(guards) = self.world.runtime.fault_many(&ranges, stream)? else {
            return Ok(());
        };
        if guards.len() != ranges.len() {
            let text = format!("{} guards for {} ranges", guards.len(), ranges.len());
            self.world.journal.violation(text);
        }
        for (tensor, guard) in tensors.iter().zip(&guards) {
            self.check_tensor(guard.address(), *tensor, stream)?;
        }
        Ok(())
    }

    /// A tensor stays pinned while something else is done.
    pub(super) fn use_nested(&mut self) -> Result<()> {
        let tensor = self.choice.index(self.world.tensors.len());
        let stream = self.any_stream();
        let bound = self.world.bound();
        let _usage = bound.usage.0.read();
        let fault = bound.bar.fault(tensor, stream)?;
        self.use_piece()?;
        let Fault::Resident(guard) = fault else { return Ok(()) };
        let before = guard.signature().to_vec();
        self.check_tensor(guard.address(), tensor, stream)?;
        if let Fault::Resident(again) = bound.bar.fault(tensor, stream)?
            && again.signature() != before
        {
            let text = format!("tensor {tensor}: another signature while it was pinned");
            self.world.journal.violation(text);
        }
        Ok(())
    }

    /// The CPU waits instead of a stream.
    pub(super) fn use_without_stream(&mut self) -> Result<()> {
        let tensor = self.choice.index(self.world.tensors.len());
        let stream = self.any_stream();
        self.tell(|| format!("tensor {tensor} on no stream"));
        let bound = self.world.bound();
        let _usage = bound.usage.0.read();
        let Fault::Resident(guard) = bound.bar.fault(tensor, Stream::NONE)? else {
            return Ok(());
        };
        let checked = self.check_tensor(guard.address(), tensor, stream);
        // Without a stream the unpin promises that the work is done.
        self.world.runtime.device().driver.stream_synchronize(stream)?;
        drop(guard);
        checked
    }

    /// One guard for work on two streams.
    pub(super) fn use_on_two_streams(&mut self) -> Result<()> {
        let tensor = self.choice.index(self.world.tensors.len());
        let (first, second) = (self.any_stream(), self.any_stream());
        self.tell(|| format!("tensor {tensor} on {first:?} and {second:?}"));
        let bound = self.world.bound();
        let _usage = bound.usage.0.read();
        let Fault::Resident(guard) = bound.bar.fault(tensor, first)? else { return Ok(()) };
        // Orders the second stream behind the fill; its pins go at once.
        let Fault::Resident(ordered) = bound.bar.fault(tensor, second)? else { return Ok(()) };
        let mut checked = self.check_tensor(guard.address(), tensor, first);
        checked = checked.and(self.check_tensor(guard.address(), tensor, second));
        let named = guard.also_used_on(second);
        drop(guard);
        drop(ordered);
        checked.and(named)
    }
}

/// A refill is asked for only when nothing was committed or a page lost its bytes since.
fn check_that_bytes_were_lost(
    world: &World,
    bare: &Bare,
    piece: &Piece,
    content: &Content,
    stream: Stream,
) {
    if content.version.is_none() {
        return;
    }
    // The fill's own pins keep the signature as the fill found it.
    let Ok(Fault::Resident(guard)) = bare.vbar.fault(piece.allocation.range(), stream) else {
        return;
    };
    if guard.signature() == content.signature {
        let text = format!("{}: a refill, and no page has lost its bytes", guard.address());
        world.journal.violation(text);
    }
}
