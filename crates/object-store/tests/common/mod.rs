//! Stores in files of a temporary directory.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::PathBuf;

use draconis_access::Store;
use draconis_object_store::{DraconisStore, NewStore};
use draconis_objects::LayoutKind;
use draconis_testkit::wait::wait_for;

/// A store in a file.
pub struct TestStore {
    _dir: tempfile::TempDir,
    pub file: PathBuf,
}

impl TestStore {
    pub fn create(len_bytes: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("objects.store");
        let new = NewStore {
            len_bytes: Some(len_bytes),
            layout: Some(LayoutKind::Cow),
            sparse: true,
            ..NewStore::default()
        };
        Store::create(&file, &new).unwrap();
        Self { _dir: dir, file }
    }

    /// Opens the store, once work that nobody waits for has released it.
    pub fn open(&self) -> DraconisStore {
        wait_for("the store is free", || DraconisStore::open(&self.file).ok())
    }

    /// Opens the store once more, and fails if a check finds damage.
    pub fn check(&self) {
        drop(self.open());
        let report = Store::check(&self.file).unwrap();
        assert!(report.is_clean(), "{:?}", report.damage);
    }
}
