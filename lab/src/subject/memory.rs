//! Files in this process's memory, for measuring the overhead of the lab itself.

use draconis_types::lock::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Context;

use super::{OpenMode, Subject, SubjectFile, SubjectFiles, SubjectKind};
use crate::clock::{Clock, WallClock};

/// The memory of the machine.
pub struct MemorySubject {
    clock: Arc<WallClock>,
    files: Arc<MemoryFiles>,
}

impl MemorySubject {
    /// Creates an empty set of files.
    pub fn new() -> Self {
        Self { clock: Arc::new(WallClock::new()), files: Arc::default() }
    }
}

impl Subject for MemorySubject {
    fn name(&self) -> String {
        "mem".into()
    }

    fn describe(&self) -> String {
        "the machine's memory".into()
    }

    fn kind(&self) -> SubjectKind {
        SubjectKind::Memory
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn files(&self) -> anyhow::Result<Arc<dyn SubjectFiles>> {
        Ok(self.files.clone())
    }
}

type SharedContents = Arc<RwLock<Vec<u8>>>;

/// Files in memory.
#[derive(Default)]
pub struct MemoryFiles(Mutex<HashMap<String, SharedContents>>);

struct MemoryHandle(SharedContents);

impl SubjectFiles for MemoryFiles {
    fn create(&self, name: &str, _: u64, _: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>> {
        let contents = SharedContents::default();
        let mut files = self.0.lock();
        files.insert(name.to_string(), contents.clone());
        Ok(Arc::new(MemoryHandle(contents)))
    }

    fn open(&self, name: &str, _: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>> {
        let files = self.0.lock();
        let contents = files.get(name).cloned().with_context(|| format!("no file {name}"))?;
        Ok(Arc::new(MemoryHandle(contents)))
    }

    fn remove(&self, name: &str) -> anyhow::Result<()> {
        self.0.lock().remove(name);
        Ok(())
    }
}

impl SubjectFile for MemoryHandle {
    fn read(&self, at: u64, into: &mut [u8]) -> anyhow::Result<usize> {
        let bytes = self.0.read();
        let from = bytes.get(at as usize..).unwrap_or_default();
        let len = from.len().min(into.len());
        into[..len].copy_from_slice(&from[..len]);
        Ok(len)
    }

    fn write(&self, at: u64, new: &[u8]) -> anyhow::Result<()> {
        let mut bytes = self.0.write();
        let end = at as usize + new.len();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[at as usize..end].copy_from_slice(new);
        Ok(())
    }

    fn sync(&self) -> anyhow::Result<()> {
        Ok(())
    }
}
