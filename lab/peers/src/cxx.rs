//! LevelDB and RocksDB: the system's C++ libraries through their C interfaces, which differ only
//! in a prefix.
//!
//! Law: every pointer from a library is freed exactly once, by `Drop` or by the function that
//! received it.
#![allow(unsafe_code)]

use std::path::Path;

use crate::kv::StoreStatistics;

/// Parses a store's own log: tables at level 0, and compactions.
fn from_log(dir: &Path, table: &str) -> anyhow::Result<StoreStatistics> {
    let text = String::from_utf8_lossy(&std::fs::read(dir.join("LOG"))?).into_owned();
    let count = |what: &dyn Fn(&str) -> bool| text.lines().filter(|line| what(line)).count() as u64;
    Ok(StoreStatistics {
        level0_tables: Some(count(&|line| line.contains(table) && line.contains("started"))),
        compactions: Some(count(&|line| line.contains("Compacting ") && line.contains('@'))),
    })
}

macro_rules! store {
    (
        $module:ident, $library:literal, $table:literal, $tune:path, $cache_drop:ident
        $iterator:ident $iterator_drop:ident $first:ident $valid:ident $next:ident
        $key_at:ident $value_at:ident $iterator_error:ident
        $open:ident $close:ident $put:ident $get:ident $delete:ident $free:ident
        $options:ident $options_drop:ident $create:ident
        $write:ident $write_drop:ident $write_sync:ident $read:ident $read_drop:ident
    ) => {
        /// Binding of one library.
        pub mod $module {
            use std::ffi::{CStr, CString, c_char, c_uchar, c_void};
            use std::os::unix::ffi::OsStrExt;
            use std::path::{Path, PathBuf};
            use std::ptr;

            use anyhow::bail;

            use crate::kv::{KvSubject, ScanCallback, StoreOptions, StoreStatistics};

            #[link(name = $library)]
            // SAFETY: declared as in the library's c.h.
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
                fn $cache_drop(cache: *mut c_void);
                fn $iterator(db: *mut c_void, o: *const c_void) -> *mut c_void;
                fn $iterator_drop(i: *mut c_void);
                fn $first(i: *mut c_void);
                fn $valid(i: *const c_void) -> c_uchar;
                fn $next(i: *mut c_void);
                fn $key_at(i: *const c_void, len: *mut usize) -> *const c_char;
                fn $value_at(i: *const c_void, len: *mut usize) -> *const c_char;
                fn $iterator_error(i: *const c_void, e: *mut *mut c_char);
            }

            /// An open database.
            pub struct Store {
                db: *mut c_void,
                write: *mut c_void,
                durable: *mut c_void,
                read: *mut c_void,
                /// Null for the library's default cache.
                cache: *mut c_void,
                dir: PathBuf,
            }

            // SAFETY: the libraries document that a database can be used by many threads without
            // external locks; options are only read.
            unsafe impl Send for Store {}
            // SAFETY: as above.
            unsafe impl Sync for Store {}

            /// Fails if a call has set its error pointer.
            fn check(error: *mut c_char) -> anyhow::Result<()> {
                if error.is_null() {
                    return Ok(());
                }
                // SAFETY: an error is a NUL-terminated string that the caller must free.
                let text = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
                // SAFETY: it is not used afterwards.
                unsafe { $free(error.cast()) };
                bail!("{text}")
            }

            impl Store {
                /// Opens the database in `dir`, and creates it if missing.
                ///
                /// # Errors
                /// The library fails.
                pub fn open(dir: &Path, how: StoreOptions) -> anyhow::Result<Self> {
                    let name = CString::new(dir.as_os_str().as_bytes())?;
                    let mut error = ptr::null_mut();
                    // SAFETY: options live until they are dropped below, the name is a C string,
                    // and the error is checked before the database is used.
                    let (db, cache) = unsafe {
                        let options = $options();
                        $create(options, 1);
                        let cache = $tune(options, how);
                        let db = $open(options, name.as_ptr(), &mut error);
                        $options_drop(options);
                        (db, cache)
                    };
                    check(error)?;
                    // SAFETY: creates options, which Drop frees.
                    let (write, durable_write, read) = unsafe { ($write(), $write(), $read()) };
                    // SAFETY: the options were just created.
                    unsafe {
                        $write_sync(write, u8::from(how.durable));
                        $write_sync(durable_write, 1);
                    }
                    let (durable, dir) = (durable_write, dir.into());
                    Ok(Self { db, write, durable, read, cache, dir })
                }

                fn write(&self, how: *mut c_void, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
                    let mut error = ptr::null_mut();
                    // SAFETY: the call copies both slices.
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
                    // SAFETY: all pointers come from the library and are no longer in use.
                    unsafe {
                        $close(self.db);
                        $write_drop(self.write);
                        $write_drop(self.durable);
                        $read_drop(self.read);
                        if !self.cache.is_null() {
                            $cache_drop(self.cache);
                        }
                    }
                }
            }

            /// An iterator of the library.
            struct Cursor(*mut c_void);

            impl Cursor {
                /// Returns the bytes that an accessor function returns.
                fn at(
                    &self,
                    show: unsafe extern "C" fn(*const c_void, *mut usize) -> *const c_char,
                ) -> &[u8] {
                    let mut len = 0;
                    // SAFETY: the library guarantees `len` bytes until the iterator moves.
                    unsafe {
                        let bytes = show(self.0, &mut len);
                        std::slice::from_raw_parts(bytes.cast::<u8>(), len)
                    }
                }
            }

            impl Drop for Cursor {
                fn drop(&mut self) {
                    // SAFETY: it came from the library and is not used afterwards.
                    unsafe { $iterator_drop(self.0) };
                }
            }

            impl KvSubject for Store {
                fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
                    self.write(self.write, key, value)
                }

                fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
                    let (mut error, mut len) = (ptr::null_mut(), 0);
                    // SAFETY: the key outlives the call.
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
                    // SAFETY: the library guarantees `len` bytes.
                    let bytes = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len) };
                    let bytes = bytes.to_vec();
                    // SAFETY: the caller must free it, and it was copied.
                    unsafe { $free(value.cast()) };
                    Ok(Some(bytes))
                }

                fn scan(&self, visit: ScanCallback<'_>) -> anyhow::Result<()> {
                    // SAFETY: the database and the options outlive the iterator.
                    let cursor = Cursor(unsafe { $iterator(self.db, self.read) });
                    // SAFETY: the iterator is open.
                    unsafe { $first(cursor.0) };
                    // SAFETY: as above.
                    while unsafe { $valid(cursor.0) } != 0 {
                        if !visit(cursor.at($key_at), cursor.at($value_at)) {
                            break;
                        }
                        // SAFETY: it is at a pair whose bytes are no longer in use.
                        unsafe { $next(cursor.0) };
                    }
                    let mut error = ptr::null_mut();
                    // SAFETY: as above.
                    unsafe { $iterator_error(cursor.0, &mut error) };
                    check(error)
                }

                fn delete(&self, key: &[u8]) -> anyhow::Result<()> {
                    let mut error = ptr::null_mut();
                    // SAFETY: the key outlives the call.
                    unsafe {
                        $delete(self.db, self.write, key.as_ptr().cast(), key.len(), &mut error);
                    }
                    check(error)
                }

                fn sync(&self) -> anyhow::Result<()> {
                    // A durable write makes the log up to itself durable.
                    self.write(self.durable, b"", b"")
                }

                fn statistics(&self) -> anyhow::Result<StoreStatistics> {
                    super::from_log(&self.dir, $table)
                }
            }
        }
    };
}

#[cfg(feature = "leveldb")]
store!(
    leveldb, "leveldb", "Level-0 table #", super::leveldb_tuning::tune, leveldb_cache_destroy
    leveldb_create_iterator leveldb_iter_destroy leveldb_iter_seek_to_first leveldb_iter_valid
    leveldb_iter_next leveldb_iter_key leveldb_iter_value leveldb_iter_get_error
    leveldb_open leveldb_close leveldb_put leveldb_get leveldb_delete leveldb_free
    leveldb_options_create leveldb_options_destroy leveldb_options_set_create_if_missing
    leveldb_writeoptions_create leveldb_writeoptions_destroy leveldb_writeoptions_set_sync
    leveldb_readoptions_create leveldb_readoptions_destroy
);

#[cfg(feature = "rocksdb")]
store!(
    rocksdb, "rocksdb", "Level-0 flush table #", super::rocksdb_tuning::tune, rocksdb_cache_destroy
    rocksdb_create_iterator rocksdb_iter_destroy rocksdb_iter_seek_to_first rocksdb_iter_valid
    rocksdb_iter_next rocksdb_iter_key rocksdb_iter_value rocksdb_iter_get_error
    rocksdb_open rocksdb_close rocksdb_put rocksdb_get rocksdb_delete rocksdb_free
    rocksdb_options_create rocksdb_options_destroy rocksdb_options_set_create_if_missing
    rocksdb_writeoptions_create rocksdb_writeoptions_destroy rocksdb_writeoptions_set_sync
    rocksdb_readoptions_create rocksdb_readoptions_destroy
);

/// Memory limits of LevelDB.
#[cfg(feature = "leveldb")]
mod leveldb_tuning {
    use std::ffi::c_void;
    use std::ptr;

    use crate::kv::StoreOptions;

    // SAFETY: declared as in the library's c.h.
    unsafe extern "C" {
        fn leveldb_cache_create_lru(bytes: usize) -> *mut c_void;
        fn leveldb_options_set_cache(options: *mut c_void, cache: *mut c_void);
        fn leveldb_options_set_write_buffer_size(options: *mut c_void, bytes: usize);
    }

    /// Sets a cache in the options; it must be dropped after the database. Null for the default.
    ///
    /// # Safety
    /// `options` must be open options of the library.
    pub unsafe fn tune(options: *mut c_void, how: StoreOptions) -> *mut c_void {
        let Some(bytes) = how.cache_bytes else { return ptr::null_mut() };
        // SAFETY: guaranteed by the caller; the cache lives until it is dropped.
        unsafe {
            let cache = leveldb_cache_create_lru(bytes as usize / 4 * 3);
            leveldb_options_set_cache(options, cache);
            // Two buffers at most. The default is 4 MiB; the documentation says that larger buffers
            // load faster.
            leveldb_options_set_write_buffer_size(options, bytes as usize / 8);
            cache
        }
    }
}

/// Memory limits of RocksDB.
#[cfg(feature = "rocksdb")]
mod rocksdb_tuning {
    use std::ffi::{c_int, c_void};
    use std::ptr;

    use crate::kv::StoreOptions;

    // SAFETY: declared as in the library's c.h.
    unsafe extern "C" {
        fn rocksdb_cache_create_lru(bytes: usize) -> *mut c_void;
        fn rocksdb_block_based_options_create() -> *mut c_void;
        fn rocksdb_block_based_options_destroy(table: *mut c_void);
        fn rocksdb_block_based_options_set_block_cache(table: *mut c_void, cache: *mut c_void);
        fn rocksdb_options_set_block_based_table_factory(options: *mut c_void, table: *mut c_void);
        fn rocksdb_options_optimize_level_style_compaction(options: *mut c_void, bytes: u64);
        fn rocksdb_options_increase_parallelism(options: *mut c_void, threads: c_int);
    }

    /// Sets a cache in the options; it must be dropped after the database. Null for the default.
    ///
    /// # Safety
    /// `options` must be open options of the library.
    pub unsafe fn tune(options: *mut c_void, how: StoreOptions) -> *mut c_void {
        let Some(bytes) = how.cache_bytes else { return ptr::null_mut() };
        // SAFETY: guaranteed by the caller; the table options are copied into the options.
        unsafe {
            let cache = rocksdb_cache_create_lru(bytes as usize / 4 * 3);
            let table = rocksdb_block_based_options_create();
            rocksdb_block_based_options_set_block_cache(table, cache);
            rocksdb_options_set_block_based_table_factory(options, table);
            rocksdb_block_based_options_destroy(table);
            // As its tuning guide begins: a memtable budget, from which the sizes of buffers, files
            // and levels follow, and one thread per CPU.
            rocksdb_options_optimize_level_style_compaction(options, bytes / 4);
            let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
            rocksdb_options_increase_parallelism(options, c_int::try_from(threads).unwrap_or(1));
            cache
        }
    }
}
