//! LevelDB and RocksDB: the system's C++ libraries through their C interfaces, which are
//! alike but for a prefix.
//!
//! Law: every pointer that a library gave is given back to it once, by `Drop` or in the
//! function that took it.
#![allow(unsafe_code)]

use std::path::Path;

use crate::kv::Statistics;

/// What a store wrote into its own log: tables at level 0, and compactions.
fn from_log(dir: &Path, table: &str) -> anyhow::Result<Statistics> {
    let text = String::from_utf8_lossy(&std::fs::read(dir.join("LOG"))?).into_owned();
    let count = |what: &dyn Fn(&str) -> bool| text.lines().filter(|line| what(line)).count() as u64;
    Ok(Statistics {
        level0_tables: Some(count(&|line| line.contains(table) && line.contains("started"))),
        compactions: Some(count(&|line| line.contains("Compacting ") && line.contains('@'))),
    })
}

macro_rules! store {
    (
        $module:ident, $library:literal, $table:literal,
        $open:ident $close:ident $put:ident $get:ident $delete:ident $free:ident
        $options:ident $options_drop:ident $create:ident
        $write:ident $write_drop:ident $write_sync:ident $read:ident $read_drop:ident
    ) => {
        /// The library of that name.
        pub mod $module {
            use std::ffi::{CStr, CString, c_char, c_uchar, c_void};
            use std::os::unix::ffi::OsStrExt;
            use std::path::{Path, PathBuf};
            use std::ptr;

            use anyhow::bail;

            use crate::kv::{KvSubject, Statistics};

            #[link(name = $library)]
            // SAFETY: as the library's c.h declares them.
            unsafe extern "C" {
                fn $open(o: *const c_void, name: *const c_char, e: *mut *mut c_char)
                -> *mut c_void;
                fn $close(db: *mut c_void);
                fn $put(
                    db: *mut c_void,
                    o: *const c_void,
                    key: *const c_char,
                    key_len: usize,
                    value: *const c_char,
                    value_len: usize,
                    e: *mut *mut c_char,
                );
                fn $get(
                    db: *mut c_void,
                    o: *const c_void,
                    key: *const c_char,
                    key_len: usize,
                    value_len: *mut usize,
                    e: *mut *mut c_char,
                ) -> *mut c_char;
                fn $delete(
                    db: *mut c_void,
                    o: *const c_void,
                    key: *const c_char,
                    key_len: usize,
                    e: *mut *mut c_char,
                );
                fn $free(memory: *mut c_void);
                fn $options() -> *mut c_void;
                fn $options_drop(o: *mut c_void);
                fn $create(o: *mut c_void, on: c_uchar);
                fn $write() -> *mut c_void;
                fn $write_drop(o: *mut c_void);
                fn $write_sync(o: *mut c_void, on: c_uchar);
                fn $read() -> *mut c_void;
                fn $read_drop(o: *mut c_void);
            }

            /// An open database.
            pub struct Store {
                db: *mut c_void,
                write: *mut c_void,
                durable: *mut c_void,
                read: *mut c_void,
                dir: PathBuf,
            }

            // SAFETY: the libraries say that a database may be used by many threads without
            // a lock of theirs; options are only read.
            unsafe impl Send for Store {}
            // SAFETY: as above.
            unsafe impl Sync for Store {}

            /// The error that a call left, if it left one.
            fn check(error: *mut c_char) -> anyhow::Result<()> {
                if error.is_null() {
                    return Ok(());
                }
                // SAFETY: an error is a string that ends with a zero and is ours to free.
                let text = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
                // SAFETY: it is not used after this.
                unsafe { $free(error.cast()) };
                bail!("{text}")
            }

            impl Store {
                /// Opens the database in `dir`; makes it if there is none.
                ///
                /// # Errors
                /// What the library says.
                pub fn open(dir: &Path, durable: bool) -> anyhow::Result<Self> {
                    let name = CString::new(dir.as_os_str().as_bytes())?;
                    let mut error = ptr::null_mut();
                    // SAFETY: options live until they are dropped below, the name is a C
                    // string, and the error is looked at before the database is used.
                    let db = unsafe {
                        let options = $options();
                        $create(options, 1);
                        let db = $open(options, name.as_ptr(), &mut error);
                        $options_drop(options);
                        db
                    };
                    check(error)?;
                    // SAFETY: makes options, which Drop gives back.
                    let (write, durable_write, read) = unsafe { ($write(), $write(), $read()) };
                    // SAFETY: options that were just made.
                    unsafe {
                        $write_sync(write, u8::from(durable));
                        $write_sync(durable_write, 1);
                    }
                    Ok(Self { db, write, durable: durable_write, read, dir: dir.into() })
                }

                fn write(&self, how: *mut c_void, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
                    let mut error = ptr::null_mut();
                    // SAFETY: both slices live as long as the call, which copies them.
                    unsafe {
                        $put(
                            self.db,
                            how,
                            key.as_ptr().cast(),
                            key.len(),
                            value.as_ptr().cast(),
                            value.len(),
                            &mut error,
                        );
                    }
                    check(error)
                }
            }

            impl Drop for Store {
                fn drop(&mut self) {
                    // SAFETY: all four came from the library and nobody uses them any more.
                    unsafe {
                        $close(self.db);
                        $write_drop(self.write);
                        $write_drop(self.durable);
                        $read_drop(self.read);
                    }
                }
            }

            impl KvSubject for Store {
                fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
                    self.write(self.write, key, value)
                }

                fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
                    let (mut error, mut len) = (ptr::null_mut(), 0);
                    // SAFETY: the key lives as long as the call.
                    let value = unsafe {
                        $get(
                            self.db,
                            self.read,
                            key.as_ptr().cast(),
                            key.len(),
                            &mut len,
                            &mut error,
                        )
                    };
                    check(error)?;
                    if value.is_null() {
                        return Ok(None);
                    }
                    // SAFETY: the library says that there are `len` bytes.
                    let bytes = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len) };
                    let bytes = bytes.to_vec();
                    // SAFETY: it is ours to free, and was copied.
                    unsafe { $free(value.cast()) };
                    Ok(Some(bytes))
                }

                fn delete(&self, key: &[u8]) -> anyhow::Result<()> {
                    let mut error = ptr::null_mut();
                    // SAFETY: the key lives as long as the call.
                    unsafe {
                        $delete(self.db, self.write, key.as_ptr().cast(), key.len(), &mut error);
                    }
                    check(error)
                }

                fn sync(&self) -> anyhow::Result<()> {
                    // A durable write makes the log durable up to itself.
                    self.write(self.durable, b"", b"")
                }

                fn statistics(&self) -> anyhow::Result<Statistics> {
                    super::from_log(&self.dir, $table)
                }
            }
        }
    };
}

#[cfg(feature = "leveldb")]
store!(
    leveldb, "leveldb", "Level-0 table #",
    leveldb_open leveldb_close leveldb_put leveldb_get leveldb_delete leveldb_free
    leveldb_options_create leveldb_options_destroy leveldb_options_set_create_if_missing
    leveldb_writeoptions_create leveldb_writeoptions_destroy leveldb_writeoptions_set_sync
    leveldb_readoptions_create leveldb_readoptions_destroy
);

#[cfg(feature = "rocksdb")]
store!(
    rocksdb, "rocksdb", "Level-0 flush table #",
    rocksdb_open rocksdb_close rocksdb_put rocksdb_get rocksdb_delete rocksdb_free
    rocksdb_options_create rocksdb_options_destroy rocksdb_options_set_create_if_missing
    rocksdb_writeoptions_create rocksdb_writeoptions_destroy rocksdb_writeoptions_set_sync
    rocksdb_readoptions_create rocksdb_readoptions_destroy
);
