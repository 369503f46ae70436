//! A store: objects, their names, keys.

use std::ops::Bound as End;
use std::path::PathBuf;
use std::sync::Arc;

use draconis_access::NewStore;
use draconis_objects::kv::Batch;
use draconis_objects::{Group, LayoutKind, LifetimeHint, ObjectId, Ticket};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::{force_of, unlocked};

/// An open store.
#[pyclass(frozen, module = "draconis._draconis")]
pub struct Store(Arc<draconis_access::Store>);

/// Keys and values as they were when the scan began.
#[pyclass(frozen, module = "draconis._draconis")]
pub struct Keys(draconis_access::KeyIterator);

#[pymethods]
impl Store {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, write: bool) -> PyResult<Self> {
        let open = || match write {
            true => draconis_access::Store::open_for_writing(&path),
            false => draconis_access::Store::open(&path),
        };
        unlocked(py, open).map(Self)
    }

    #[staticmethod]
    fn create(
        py: Python<'_>,
        path: PathBuf,
        size: Option<u64>,
        layout: Option<&str>,
        sparse: bool,
        force: Option<String>,
    ) -> PyResult<()> {
        let layout = match layout {
            None => None,
            Some("log") => Some(LayoutKind::Log),
            Some("cow") => Some(LayoutKind::Cow),
            Some(other) => {
                return Err(PyValueError::new_err(format!("layout {other}: log or cow")));
            }
        };
        let new = NewStore { len_bytes: size, layout, sparse, force: force_of(force) };
        unlocked(py, || draconis_access::Store::create(&path, &new))
    }

    /// Whether it is clean and complete, what is damaged and how much more, objects and keys.
    #[staticmethod]
    fn check(py: Python<'_>, path: PathBuf) -> PyResult<(bool, bool, Vec<String>, u64, u64, u64)> {
        let found = unlocked(py, || draconis_access::Store::check(&path))?;
        let damage = found.damage.iter().map(ToString::to_string).collect();
        Ok((found.is_clean(), found.is_complete, damage, found.more, found.objects, found.keys))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        unlocked(py, || self.0.close())
    }

    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        unlocked(py, || self.0.sync())
    }

    fn wait(&self, py: Python<'_>, ticket: u64) -> PyResult<()> {
        unlocked(py, || self.0.wait(Ticket(ticket)))
    }

    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let info = unlocked(py, || self.0.info())?;
        let dict = PyDict::new(py);
        dict.set_item("layout", info.profile.layout.to_string())?;
        dict.set_item("page_size", info.profile.page_bytes)?;
        dict.set_item("segment_size", info.profile.segment_bytes)?;
        dict.set_item("size", info.disk_bytes)?;
        dict.set_item("capacity", info.capacity_bytes)?;
        dict.set_item("used", info.used_bytes)?;
        Ok(dict)
    }

    /// Makes an object, with a name if there is one; its number and the ticket.
    fn put_new(&self, py: Python<'_>, bytes: &[u8], name: Option<&[u8]>) -> PyResult<(u64, u64)> {
        unlocked(py, || {
            let mut group = Group::new();
            let id = group.create(self.0.new_object()?, LifetimeHint::Unknown);
            group.append(id, bytes);
            if let Some(name) = name {
                group.set_name(name, id);
            }
            Ok((id.0, self.0.submit(group)?.0))
        })
    }

    /// Gives an object other contents, whole or not at all.
    fn replace(&self, py: Python<'_>, id: u64, bytes: &[u8]) -> PyResult<u64> {
        unlocked(py, || {
            let mut group = Group::new();
            group.truncate(ObjectId(id), 0);
            group.append(ObjectId(id), bytes);
            Ok(self.0.submit(group)?.0)
        })
    }

    fn write(&self, py: Python<'_>, id: u64, at: u64, bytes: &[u8]) -> PyResult<u64> {
        unlocked(py, || {
            let mut group = Group::new();
            group.write(ObjectId(id), at, bytes);
            Ok(self.0.submit(group)?.0)
        })
    }

    fn append(&self, py: Python<'_>, id: u64, bytes: &[u8]) -> PyResult<u64> {
        unlocked(py, || {
            let mut group = Group::new();
            group.append(ObjectId(id), bytes);
            Ok(self.0.submit(group)?.0)
        })
    }

    fn truncate(&self, py: Python<'_>, id: u64, size: u64) -> PyResult<u64> {
        unlocked(py, || {
            let mut group = Group::new();
            group.truncate(ObjectId(id), size);
            Ok(self.0.submit(group)?.0)
        })
    }

    /// Deletes an object, and its names with it.
    fn delete(&self, py: Python<'_>, id: u64) -> PyResult<u64> {
        unlocked(py, || {
            let mut group = Group::new();
            for (name, of) in self.0.names()? {
                if of.0 == id {
                    group.remove_name(&name);
                }
            }
            group.delete(ObjectId(id));
            Ok(self.0.submit(group)?.0)
        })
    }

    fn read<'py>(
        &self,
        py: Python<'py>,
        id: u64,
        at: u64,
        len: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let there = self.len(py, id)?.saturating_sub(at);
        let len = len.min(usize::try_from(there).unwrap_or(usize::MAX));
        let mut got = 0;
        let bytes = PyBytes::new_with(py, len, |room| {
            got = unlocked(py, || self.0.read(ObjectId(id), at, room))?;
            Ok(())
        })?;
        if got < len { Ok(PyBytes::new(py, &bytes.as_bytes()[..got])) } else { Ok(bytes) }
    }

    fn len(&self, py: Python<'_>, id: u64) -> PyResult<u64> {
        unlocked(py, || self.0.len(ObjectId(id)))
    }

    fn list(&self, py: Python<'_>) -> PyResult<Vec<(u64, u64)>> {
        let all = unlocked(py, || self.0.list())?;
        Ok(all.into_iter().map(|(id, len)| (id.0, len)).collect())
    }

    fn named(&self, py: Python<'_>, name: &[u8]) -> PyResult<Option<u64>> {
        Ok(unlocked(py, || self.0.find_name(name))?.map(|id| id.0))
    }

    fn names<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyBytes>, u64)>> {
        let all = unlocked(py, || self.0.names())?;
        Ok(all.into_iter().map(|(name, id)| (PyBytes::new(py, &name), id.0)).collect())
    }

    /// Gives keys values, and takes those away that have none, all at once.
    fn write_keys(
        &self,
        py: Python<'_>,
        changes: Vec<(Vec<u8>, Option<Vec<u8>>)>,
    ) -> PyResult<u64> {
        unlocked(py, || {
            let mut batch = Batch::new();
            for (key, value) in &changes {
                match value {
                    Some(value) => batch.put(key, value),
                    None => batch.delete(key),
                }
            }
            Ok(self.0.write_keys(batch)?.0)
        })
    }

    fn get<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let value = unlocked(py, || self.0.get(key))?;
        Ok(value.map(|value| PyBytes::new(py, &value)))
    }

    fn count_keys(&self, py: Python<'_>) -> PyResult<u64> {
        unlocked(py, || self.0.count_keys())
    }

    fn scan(
        &self,
        py: Python<'_>,
        start: Option<&[u8]>,
        end: Option<&[u8]>,
        reverse: bool,
    ) -> PyResult<Keys> {
        let range = (
            start.map_or(End::Unbounded, End::Included),
            end.map_or(End::Unbounded, End::Excluded),
        );
        unlocked(py, || self.0.scan(range, reverse)).map(Keys)
    }
}

#[pymethods]
impl Keys {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[allow(clippy::type_complexity, reason = "Python takes it apart")]
    fn __next__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Option<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        let next = unlocked(py, || self.0.next())?;
        Ok(next.map(|(key, value)| (PyBytes::new(py, &key), PyBytes::new(py, &value))))
    }
}
