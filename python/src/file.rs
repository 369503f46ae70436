//! An open file of a volume.

use draconis_access::Error;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::volume::{Stat, stat};
use crate::{raised, unlocked};

/// An open file: reads and writes at an offset.
#[pyclass(frozen, module = "draconis._draconis")]
pub struct File(pub draconis_access::File);

#[pymethods]
impl File {
    fn read_at<'py>(
        &self,
        py: Python<'py>,
        offset: u64,
        len: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        // What is asked for beyond the end takes no memory.
        let there = unlocked(py, || self.0.stat())?.size_bytes.saturating_sub(offset);
        let len = len.min(usize::try_from(there).unwrap_or(usize::MAX));
        let mut got = 0;
        let bytes = PyBytes::new_with(py, len, |room| {
            got = unlocked(py, || self.0.read_at(offset, room))?;
            Ok(())
        })?;
        // It was cut meanwhile.
        if got < len { Ok(PyBytes::new(py, &bytes.as_bytes()[..got])) } else { Ok(bytes) }
    }

    fn write_at(&self, py: Python<'_>, offset: u64, bytes: &[u8]) -> PyResult<usize> {
        unlocked(py, || self.0.write_at(offset, bytes))
    }

    fn truncate(&self, py: Python<'_>, size: u64) -> PyResult<()> {
        unlocked(py, || self.0.set_len(size))
    }

    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        unlocked(py, || self.0.sync())
    }

    fn stat(&self, py: Python<'_>) -> PyResult<Stat> {
        let found: Result<_, Error> = py.detach(|| self.0.stat());
        Ok(stat(&found.map_err(raised)?))
    }
}
