//! What `draconis/__init__.py` stands on: volumes, files and stores of `draconis_access` as classes
//! with plain arguments. What is convenient is written in Python, beside its documentation.
//!
//! Law 1: the interpreter's lock is given up while anything is read or written.
//! Law 2: a failure is an `OSError` with errno and message, so that Python picks its class.

mod file;
mod store;
mod volume;

use draconis_access::overwrite::OverwritePermission;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

/// What Python raises for a failure.
fn raised(error: draconis_access::Error) -> PyErr {
    PyOSError::new_err((error.errno.raw_os_error(), error.message))
}

/// What may be overwritten: nothing, what is usual (an empty text), or one kind.
fn force_of(force: Option<String>) -> OverwritePermission {
    force.map_or(OverwritePermission::Nothing, |kind| kind.parse().unwrap_or_default())
}

/// Works without the interpreter's lock.
fn unlocked<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> draconis_access::Result<T> + Send,
) -> PyResult<T> {
    py.detach(work).map_err(raised)
}

#[pymodule]
mod _draconis {
    #[pymodule_export]
    use crate::file::File;
    #[pymodule_export]
    use crate::store::{Keys, Store};
    #[pymodule_export]
    use crate::volume::Volume;
    /// Version of the package.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
