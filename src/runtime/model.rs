//! A model bound to a VBAR of its own: faults by tensor, fills itself.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::{Fault, Guard, Runtime, Vbar};
use crate::error::{Error, ErrorCode, Result};
use crate::host::bound::{Bound, Source};
use crate::host::model_files::Model;
use crate::host::source::ModelFile;
use crate::model::binding::{Binding, lay_out};
use crate::process;
use crate::units::{DeviceAddress, Stream};

/// A safetensors model behind a VBAR.
pub struct ModelBar {
    vbar: Vbar,
    model: Model,
    places: Vec<Range<u64>>,
}

impl Runtime {
    /// Opens a safetensors model (a file, a sharded model's index, or a folder) and binds it.
    ///
    /// # Errors
    /// Those of [`Model::open`] and [`Runtime::bind_model`].
    pub fn open_model(&self, path: &Path) -> Result<ModelBar> {
        self.bind_model(Model::open(path)?)
    }

    /// Binds a model: every tensor gets an address in a new VBAR, in natural order of names, and
    /// is filled from its file when it is faulted. Takes no device memory.
    ///
    /// # Errors
    /// `InvalidArgument` for a model without bytes, `NoAddresses` for one beyond 2^64,
    /// `HostMemory` when the staging ring cannot be page-locked, and what the driver says.
    pub fn bind_model(&self, model: Model) -> Result<ModelBar> {
        if model.total_bytes() == 0 {
            let (name, count) = (model.name(), model.tensors().len());
            let text = match count {
                0 => format!("{name}: the model has no tensors, so there is nothing to bind"),
                _ => format!("{name}: none of the model's {count} tensors has a byte to bind"),
            };
            return Err(Error::new(ErrorCode::InvalidArgument, text));
        }
        let layout = lay_out(&model.layout_items(), self.page_size(), 0)?;
        let vbar = self.create_bar(layout.end)?;
        vbar.bind(layout.binding, model.files().to_vec())?;
        Ok(ModelBar { vbar, model, places: layout.places })
    }
}

impl Vbar {
    /// Binds the VBAR to files: each segment of the binding names a file by its index. From now on
    /// a fault fills what it maps.
    ///
    /// # Errors
    /// As [`Vbar::bind_sources`].
    pub fn bind(&self, binding: Binding, files: Vec<Arc<ModelFile>>) -> Result<()> {
        self.bind_sources(binding, files.into_iter().map(Source::File).collect())
    }

    /// Binds the VBAR to files and memory: each segment of the binding names its source by its
    /// index. From now on a fault fills what it maps.
    ///
    /// Memory is kept until the VBAR was closed and the last copy of its bytes is done: see
    /// [`HostMemory`](crate::host::memory::HostMemory). Whether it is page-locked is asked of the
    /// driver here, once.
    ///
    /// # Errors
    /// `InvalidArgument` when the VBAR is bound or has allocations, a segment leaves its source or
    /// the VBAR, or memory is not page-locked that must be; `Closed`; `HostMemory` when the staging
    /// ring cannot be page-locked; `ProcessEnding`; what the driver says.
    pub fn bind_sources(&self, binding: Binding, mut sources: Vec<Source>) -> Result<()> {
        process::check()?;
        self.bar().check_open()?;
        let end = binding.end();
        sources.iter_mut().try_for_each(|source| self.find_locked(source))?;
        let bound = Bound::new(binding, sources)?;
        if end == 0 {
            return Err(Error::new(ErrorCode::InvalidArgument, "a binding without bytes"));
        }
        self.runtime().pager().prepare_filler()?;
        self.runtime().pager().bind(self.bar(), Arc::new(bound), end)
    }

    fn find_locked(&self, source: &mut Source) -> Result<()> {
        let Source::Memory(memory) = source else { return Ok(()) };
        let memory = Arc::get_mut(memory).expect("nobody else has it yet");
        let device = self.runtime().device();
        memory.find_locked(|address| {
            let range = device.retry(|| device.driver.pointer_get_host_range(address));
            range.map_err(|error| device.note(error.into()))
        })
    }
}

impl ModelBar {
    /// The VBAR.
    #[must_use]
    pub fn vbar(&self) -> &Vbar {
        &self.vbar
    }

    /// The model: its tensors by index and name.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// A tensor's bytes in the VBAR; the first one is 512-byte aligned.
    ///
    /// # Panics
    /// For an index that the model does not have.
    #[must_use]
    pub fn range(&self, tensor: usize) -> Range<u64> {
        self.places[tensor].clone()
    }

    /// A tensor's address, which never changes.
    ///
    /// # Panics
    /// For an index that the model does not have.
    #[must_use]
    pub fn address(&self, tensor: usize) -> DeviceAddress {
        self.vbar.base().offset(self.places[tensor].start)
    }

    /// Index of a tensor by its name.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn index(&self, name: &str) -> Result<usize> {
        let found = self.model.tensors().iter().position(|tensor| *tensor.name == *name);
        found.ok_or_else(|| {
            let text = format!("{}: no tensor {}", self.model.name(), crate::names::quoted(name));
            Error::new(ErrorCode::NotFound, text)
        })
    }

    /// Makes a tensor's bytes resident for work on `stream`.
    ///
    /// # Errors
    /// As [`Vbar::fault`], the tensor's name before the text.
    ///
    /// # Panics
    /// For an index that the model does not have.
    pub fn fault(&self, tensor: usize, stream: Stream) -> Result<Fault<Guard<'_>>> {
        self.vbar.fault(self.range(tensor), stream).map_err(|error| {
            let name = &self.model.tensors()[tensor].name;
            error.context(format!("tensor {}", crate::names::quoted(name)))
        })
    }
}
