//! Models bound to files: filled by faults and by the engine, from files that things happen to.

use tempfile::TempDir;
use vbar::{Error, ErrorCode, Fault};

use crate::model_file::Model;
use crate::operations::Operation;
use crate::trace::Config;
use crate::world::World;

impl World {
    pub(crate) fn open_model(&mut self, device: u64, number: u64) {
        let (device, number) = (self.device(device), number as usize % 2);
        if self.models[number].is_some() {
            return;
        }
        self.files += 1;
        let folder = self.folder.get_or_insert_with(|| TempDir::new().unwrap());
        let path = folder.path().join(format!("{}.safetensors", self.files));
        let Config::World { by_reader, .. } = self.config;
        let runtime = &self.devices[device].runtime;
        match Model::open(runtime, device, number, &path, by_reader > 0) {
            Ok(model) => self.models[number] = Some(model),
            Err(error) => self.accept(device, &error),
        }
    }

    pub(crate) fn close_model(&mut self, number: u64) {
        let Some(model) = self.models[number as usize % 2].take() else { return };
        // Pins may still be held.
        let vbar = model.bar.vbar().clone();
        drop(model);
        if number % 4 < 2 {
            vbar.close();
        }
    }

    /// An error of a fault: of a file that something happened to, or as any other.
    pub(crate) fn accept_fill(&self, device: usize, error: &Error) {
        let is_any = |is_so: fn(&Model) -> bool| {
            self.models.iter().flatten().any(|model| model.device == device && is_so(model))
        };
        match error.code() {
            ErrorCode::FileChanged => assert!(is_any(|it| it.is_changed), "{error:?}"),
            ErrorCode::Io => assert!(is_any(|it| it.is_unreadable), "{error:?}"),
            _ => self.accept(device, error),
        }
    }

    pub(crate) fn tensor(
        &mut self,
        operation: &Operation,
        number: u64,
        tensor: u64,
        stream: u64,
        (pins, then): (u64, u64),
    ) {
        let Some(model) = &self.models[number as usize % 2] else { return };
        let tensors = model.tensors();
        let tensor = tensors[tensor as usize % tensors.len()];
        let device = model.device;
        let stream = self.stream(device, stream);
        let vbar = model.bar.vbar().clone();
        let (range, sum) = (model.bar.range(tensor), model.sums[tensor]);
        let was_lost = self.knows_loss(device);
        let before = self.devices[device].runtime.statistics();
        let outcome = vbar.fault(range, stream);
        self.look_at_fault(device, &before, &outcome);
        assert!(!was_lost || outcome.is_err(), "a fault of a lost device: {outcome:?}");
        match outcome {
            // Whatever happened to the file: what is resident has the bytes that it had.
            Ok(Fault::Resident(guard) | Fault::HostMapped(guard)) => {
                let place = (guard.address(), guard.bytes());
                self.verify(device, place, sum, stream);
                self.keep(device, &vbar, guard, stream, (pins, then), Some(sum));
            }
            Ok(Fault::Offloaded(refusal)) => {
                self.totals.refuse(refusal.reason.word());
                self.note_blocked(operation);
            }
            Err(error) => {
                self.accept_fill(device, &error);
                self.note_blocked(operation);
            }
        }
    }

    pub(crate) fn pass(&mut self, model: u64, stream: u64) {
        let Some(opened) = &self.models[model as usize % 2] else { return };
        for tensor in 0..opened.tensors().len() as u64 {
            let operation = Operation::Tensor { model, tensor, stream, pins: 0, then: 0 };
            self.tensor(&operation, model, tensor, stream, (0, 0));
        }
    }

    pub(crate) fn prefetch(&mut self, number: u64, tensor: u64) {
        let Some(model) = &self.models[number as usize % 2] else { return };
        let tensors = model.tensors();
        let wished = model.bar.prefetch(tensors[tensor as usize % tensors.len()]);
        self.accept_any(model.device, wished);
    }

    pub(crate) fn hint(&mut self, number: u64, backwards: u64) {
        let Some(model) = &self.models[number as usize % 2] else { return };
        let mut order = model.tensors();
        if backwards > 0 {
            order.reverse();
        }
        self.accept_any(model.device, model.bar.schedule_hint(&order));
    }

    pub(crate) fn damage(&mut self, number: u64, how: u64) {
        if let Some(model) = &mut self.models[number as usize % 2] {
            self.totals.file_faults += u64::from(how < 3);
            model.damage(how);
        }
    }
}
