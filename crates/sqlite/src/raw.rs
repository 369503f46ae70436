//! SQLite's side: the structures of its C interface, and functions that it calls.
//!
//! Law 1: all unsafe code of the crate is here. Pointers come from SQLite, which keeps the rules of
//! `sqlite3_vfs` and `sqlite3_io_methods`; each is read once, and a slice or a reference is passed
//! on.
//! Law 2: no panic crosses the boundary: it becomes [`codes::IOERR`].
//! Law 3: SQLite is called through the table that it passes to extensions, so one library serves
//! every version from [`MIN_VERSION`] on.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;

use draconis_device::ProcessBound;

use crate::bucket::{BucketParameters, PARAMETERS};
use crate::codes::{self, Code};
use crate::error::{Failure, Result};
use crate::locks::LockLevel;
use crate::vfs::{self, Answer, Control, File};

/// Name of the file system, as in `vfs=draconis`.
const VFS_NAME: &CStr = c"draconis";
/// Longest full name.
const MAX_PATH_BYTES: c_int = 4096;
/// The first version whose names of files have a prefix, so that parameters are found.
const MIN_VERSION: c_int = 3_032_000;
/// A page can be written without changing the bytes beside it.
const SECTOR_BYTES: c_int = 512;

/// `sqlite3_file`, and what we keep in it.
#[repr(C)]
struct OpenFile {
    methods: *const IoMethods,
    file: *mut ProcessBound<Box<dyn File>>,
}

/// `sqlite3_io_methods`, version 1: without the shared memory of write-ahead logs.
#[repr(C)]
pub struct IoMethods {
    version: c_int,
    close: unsafe extern "C" fn(*mut OpenFile) -> c_int,
    read: unsafe extern "C" fn(*mut OpenFile, *mut c_void, c_int, i64) -> c_int,
    write: unsafe extern "C" fn(*mut OpenFile, *const c_void, c_int, i64) -> c_int,
    truncate: unsafe extern "C" fn(*mut OpenFile, i64) -> c_int,
    sync: unsafe extern "C" fn(*mut OpenFile, c_int) -> c_int,
    file_size: unsafe extern "C" fn(*mut OpenFile, *mut i64) -> c_int,
    lock: unsafe extern "C" fn(*mut OpenFile, c_int) -> c_int,
    unlock: unsafe extern "C" fn(*mut OpenFile, c_int) -> c_int,
    check_reserved_lock: unsafe extern "C" fn(*mut OpenFile, *mut c_int) -> c_int,
    file_control: unsafe extern "C" fn(*mut OpenFile, c_int, *mut c_void) -> c_int,
    sector_size: unsafe extern "C" fn(*mut OpenFile) -> c_int,
    device_characteristics: unsafe extern "C" fn(*mut OpenFile) -> c_int,
}

static IO_METHODS: IoMethods = IoMethods {
    version: 1,
    close,
    read,
    write,
    truncate,
    sync,
    file_size,
    lock,
    unlock,
    check_reserved_lock,
    file_control,
    sector_size,
    device_characteristics,
};

/// `sqlite3_vfs`, version 2.
#[repr(C)]
pub struct Vfs {
    version: c_int,
    file_bytes: c_int,
    max_path_bytes: c_int,
    next: *mut Vfs,
    name: *const c_char,
    app_data: *mut c_void,
    open: unsafe extern "C" fn(*mut Vfs, *const c_char, *mut OpenFile, c_int, *mut c_int) -> c_int,
    delete: unsafe extern "C" fn(*mut Vfs, *const c_char, c_int) -> c_int,
    access: unsafe extern "C" fn(*mut Vfs, *const c_char, c_int, *mut c_int) -> c_int,
    full_pathname: unsafe extern "C" fn(*mut Vfs, *const c_char, c_int, *mut c_char) -> c_int,
    // Those of the default file system, which gets itself as their first argument.
    dl_open: Option<unsafe extern "C" fn(*mut Vfs, *const c_char) -> *mut c_void>,
    dl_error: Option<unsafe extern "C" fn(*mut Vfs, c_int, *mut c_char)>,
    dl_sym: Option<unsafe extern "C" fn(*mut Vfs, *mut c_void, *const c_char) -> *mut c_void>,
    dl_close: Option<unsafe extern "C" fn(*mut Vfs, *mut c_void)>,
    randomness: Option<unsafe extern "C" fn(*mut Vfs, c_int, *mut c_char) -> c_int>,
    sleep: Option<unsafe extern "C" fn(*mut Vfs, c_int) -> c_int>,
    current_time: Option<unsafe extern "C" fn(*mut Vfs, *mut f64) -> c_int>,
    last_error: Option<unsafe extern "C" fn(*mut Vfs, c_int, *mut c_char) -> c_int>,
    current_time_i64: Option<unsafe extern "C" fn(*mut Vfs, *mut i64) -> c_int>,
}

type ScalarFunction = unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_void);

/// Functions of SQLite.
#[derive(Clone, Copy)]
struct Api {
    result_text: unsafe extern "C" fn(*mut c_void, *const c_char, c_int, isize),
    vfs_find: unsafe extern "C" fn(*const c_char) -> *mut Vfs,
    vfs_register: unsafe extern "C" fn(*mut Vfs, c_int) -> c_int,
    create_function: unsafe extern "C" fn(
        *mut c_void,
        *const c_char,
        c_int,
        c_int,
        *mut c_void,
        Option<ScalarFunction>,
        *const c_void,
        *const c_void,
        *const c_void,
    ) -> c_int,
    log: unsafe extern "C" fn(c_int, *const c_char, ...),
    uri_parameter: unsafe extern "C" fn(*const c_char, *const c_char) -> *const c_char,
    malloc64: unsafe extern "C" fn(u64) -> *mut c_void,
}

/// Slots of `sqlite3_api_routines`, which is only ever extended at its end.
pub(crate) mod slots {
    pub const LIBVERSION_NUMBER: usize = 67;
    pub const RESULT_TEXT: usize = 85;
    pub const VFS_FIND: usize = 141;
    pub const VFS_REGISTER: usize = 142;
    pub const CREATE_FUNCTION_V2: usize = 162;
    pub const LOG: usize = 167;
    pub const URI_PARAMETER: usize = 189;
    pub const MALLOC64: usize = 197;
}

impl Api {
    /// Reads the table that SQLite passes to an extension.
    ///
    /// # Safety
    /// `table` is a `sqlite3_api_routines` of SQLite 3.32 or newer, or a prefix of it up to
    /// `libversion_number` of an older one, which is refused.
    unsafe fn read(table: *const *const c_void) -> Option<Self> {
        /// # Safety
        /// `F` is the type of the function in the slot.
        unsafe fn slot<F: Copy>(table: *const *const c_void, index: usize) -> F {
            const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
            // SAFETY: as the caller promises.
            unsafe { std::mem::transmute_copy(&*table.add(index)) }
        }
        // SAFETY: each slot has a function of the type of the field, and the table is that long
        // in the versions that the first of them lets through.
        unsafe {
            let libversion_number: unsafe extern "C" fn() -> c_int =
                slot(table, slots::LIBVERSION_NUMBER);
            if libversion_number() < MIN_VERSION {
                return None;
            }
            Some(Self {
                result_text: slot(table, slots::RESULT_TEXT),
                vfs_find: slot(table, slots::VFS_FIND),
                vfs_register: slot(table, slots::VFS_REGISTER),
                create_function: slot(table, slots::CREATE_FUNCTION_V2),
                log: slot(table, slots::LOG),
                uri_parameter: slot(table, slots::URI_PARAMETER),
                malloc64: slot(table, slots::MALLOC64),
            })
        }
    }

    /// Writes a message to SQLite's error log.
    fn write_log(&self, code: Code, message: &str) {
        let text: Vec<u8> = message.bytes().filter(|byte| *byte != 0).chain([0]).collect();
        // SAFETY: a format with one string that ends with a zero.
        unsafe { (self.log)(code, c"draconis: %s".as_ptr(), text.as_ptr()) }
    }

    /// Returns a string that SQLite frees; null if there is no memory.
    fn to_sqlite_string(self, text: &str) -> *mut c_char {
        // SAFETY: the allocation has that many bytes, and is checked.
        unsafe {
            let copy: *mut u8 = (self.malloc64)(text.len() as u64 + 1).cast();
            if !copy.is_null() {
                ptr::copy_nonoverlapping(text.as_ptr(), copy, text.len());
                *copy.add(text.len()) = 0;
            }
            copy.cast()
        }
    }
}

/// What was registered with SQLite.
struct Registered {
    api: Api,
    /// The file system for temporary files, and for everything but files.
    default_vfs: *mut Vfs,
}

// SAFETY: SQLite's functions and file systems are called from any thread.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

static REGISTERED: OnceLock<Registered> = OnceLock::new();

thread_local! {
    /// Message of the newest failure in this thread, for the SQL function `draconis_error`.
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Registers the file system, and the function `draconis_error` with this connection.
///
/// # Safety
/// As SQLite calls the entry point of an extension.
pub(crate) unsafe fn register(db: *mut c_void, table: *const *const c_void) -> Result<()> {
    let refused = |why: &str| Err(Failure::new(codes::ERROR, why));
    if table.is_null() {
        return refused("this SQLite was built without extensions");
    }
    // SAFETY: the caller passes SQLite's table.
    let Some(api) = (unsafe { Api::read(table) }) else {
        return refused("SQLite 3.32 or newer is needed");
    };
    // SAFETY: the functions are those of SQLite, and the structure is never freed.
    unsafe {
        if (api.vfs_find)(VFS_NAME.as_ptr()).is_null() {
            let default_vfs = (api.vfs_find)(ptr::null());
            if default_vfs.is_null() {
                return refused("this SQLite has no file system for temporary files");
            }
            let default = &*default_vfs;
            if REGISTERED.set(Registered { api, default_vfs }).is_err() {
                return refused("the library serves another SQLite of this process");
            }
            let own_bytes = c_int::try_from(size_of::<OpenFile>()).unwrap_or(c_int::MAX);
            let vfs = Box::leak(Box::new(Vfs {
                version: 2.min(default.version),
                // The default one opens temporary files in our place.
                file_bytes: default.file_bytes.max(own_bytes),
                max_path_bytes: MAX_PATH_BYTES.max(default.max_path_bytes),
                next: ptr::null_mut(),
                name: VFS_NAME.as_ptr(),
                app_data: ptr::null_mut(),
                open,
                delete,
                access,
                full_pathname,
                dl_open: default.dl_open.map(|_| dl_open as _),
                dl_error: default.dl_error.map(|_| dl_error as _),
                dl_sym: default.dl_sym.map(|_| dl_sym as _),
                dl_close: default.dl_close.map(|_| dl_close as _),
                randomness: default.randomness.map(|_| randomness as _),
                sleep: default.sleep.map(|_| sleep as _),
                current_time: default.current_time.map(|_| current_time as _),
                last_error: Some(last_error),
                current_time_i64: match default.version {
                    2.. => default.current_time_i64.map(|_| current_time_i64 as _),
                    _ => None,
                },
            }));
            if (api.vfs_register)(vfs, 0) != codes::OK {
                return refused("SQLite refused the file system");
            }
        }
        const UTF8_DIRECT_ONLY: c_int = 1 | 0x8_0000;
        (api.create_function)(
            db,
            c"draconis_error".as_ptr(),
            0,
            UTF8_DIRECT_ONLY,
            ptr::null_mut(),
            Some(draconis_error),
            ptr::null(),
            ptr::null(),
            ptr::null(),
        );
    }
    Ok(())
}

/// Returns a message to the caller of an entry point.
///
/// # Safety
/// `out` is null or the place for an error message.
pub(crate) unsafe fn set_error_message(
    out: *mut *mut c_char,
    table: *const *const c_void,
    failure: &Failure,
) {
    if out.is_null() || table.is_null() {
        return;
    }
    // SAFETY: as the caller promises.
    if let Some(api) = unsafe { Api::read(table) } {
        // SAFETY: as the caller promises.
        unsafe { *out = api.to_sqlite_string(&failure.message) };
    }
}

unsafe extern "C" fn draconis_error(context: *mut c_void, _: c_int, _: *mut *mut c_void) {
    const TRANSIENT: isize = -1;
    let Some(registered) = REGISTERED.get() else { return };
    let message = LAST_ERROR.with_borrow(String::clone);
    let len = c_int::try_from(message.len()).unwrap_or(0);
    // SAFETY: SQLite copies the text.
    unsafe { (registered.api.result_text)(context, message.as_ptr().cast(), len, TRANSIENT) }
}

/// Runs what SQLite called for, and returns its code. Messages go to SQLite's error log.
fn run(act: impl FnOnce() -> Result<()>) -> c_int {
    let failure = match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(())) => return codes::OK,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::new(codes::IOERR, "internal error: please report it"),
    };
    if !failure.message.is_empty() {
        if let Some(registered) = REGISTERED.get() {
            registered.api.write_log(failure.code, &failure.message);
        }
        LAST_ERROR.set(failure.message);
    }
    failure.code
}

/// Returns the bytes of a name.
///
/// # Safety
/// `name` is null or ends with a zero.
unsafe fn bytes_of<'a>(name: *const c_char) -> &'a [u8] {
    match name.is_null() {
        true => &[],
        // SAFETY: as the caller promises.
        false => unsafe { CStr::from_ptr(name) }.to_bytes(),
    }
}

/// Returns the file that [`open`] stored.
///
/// # Safety
/// SQLite calls methods only of files that were opened and are not closed, one at a time.
unsafe fn file_of<'a>(file: *mut OpenFile) -> Result<&'a mut dyn File> {
    // SAFETY: as the caller promises.
    match unsafe { &mut *(*file).file }.get_mut() {
        Ok(file) => Ok(&mut **file),
        Err(inherited) => Err(Failure::new(codes::MISUSE, format!("a connection: {inherited}"))),
    }
}

fn offset(at: i64) -> Result<u64> {
    u64::try_from(at).map_err(|_| Failure::new(codes::IOERR, "a negative offset"))
}

unsafe extern "C" fn open(
    _: *mut Vfs,
    name: *const c_char,
    file: *mut OpenFile,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    // SAFETY: the file has the bytes that the file system asked for.
    unsafe { (*file).methods = ptr::null() };
    if name.is_null() {
        // A temporary file.
        let Some(registered) = REGISTERED.get() else { return codes::CANTOPEN };
        // SAFETY: the default file system, with a file that is long enough for it.
        return unsafe {
            ((*registered.default_vfs).open)(registered.default_vfs, name, file, flags, out_flags)
        };
    }
    run(|| {
        let parameters = match flags & codes::OPEN_MAIN_DB {
            0 => BucketParameters::default(),
            // SAFETY: SQLite passes the name of a database, with its parameters behind it.
            _ => unsafe { bucket_parameters(name) },
        };
        // SAFETY: a name that ends with a zero.
        let (opened, used_flags) = vfs::open(unsafe { bytes_of(name) }, flags, parameters)?;
        // SAFETY: as above; `out_flags` is null or writable.
        unsafe {
            (*file).file = Box::into_raw(Box::new(ProcessBound::new(opened)));
            (*file).methods = &IO_METHODS;
            if !out_flags.is_null() {
                *out_flags = used_flags;
            }
        }
        Ok(())
    })
}

/// Returns the parameters of the name of a database that are for buckets.
///
/// # Safety
/// SQLite passed the name to open a main database.
unsafe fn bucket_parameters(name: *const c_char) -> BucketParameters {
    let Some(registered) = REGISTERED.get() else { return BucketParameters::default() };
    let found = PARAMETERS.iter().filter_map(|parameter| {
        // SAFETY: as the caller promises; the value ends with a zero.
        let value = unsafe {
            let value = (registered.api.uri_parameter)(name, parameter.as_ptr());
            (!value.is_null()).then(|| bytes_of(value))
        };
        Some((parameter.to_str().ok()?, String::from_utf8_lossy(value?).into_owned()))
    });
    BucketParameters(found.collect())
}

unsafe extern "C" fn delete(_: *mut Vfs, name: *const c_char, _sync_directory: c_int) -> c_int {
    // SAFETY: a name that ends with a zero.
    run(|| vfs::delete(unsafe { bytes_of(name) }))
}

unsafe extern "C" fn access(
    _: *mut Vfs,
    name: *const c_char,
    _flags: c_int,
    out: *mut c_int,
) -> c_int {
    run(|| {
        // SAFETY: a name that ends with a zero, and a place for the answer.
        unsafe { *out = vfs::exists(bytes_of(name)).into() };
        Ok(())
    })
}

unsafe extern "C" fn full_pathname(
    _: *mut Vfs,
    name: *const c_char,
    out_bytes: c_int,
    out: *mut c_char,
) -> c_int {
    run(|| {
        let Some(registered) = REGISTERED.get() else { return Err(Failure::busy()) };
        // SAFETY: SQLite passes the name of a database, with its parameters behind it.
        let (name, store) = unsafe {
            let store = (registered.api.uri_parameter)(name, c"store".as_ptr());
            (bytes_of(name), (!store.is_null()).then(|| bytes_of(store)))
        };
        let full = vfs::full_name(name, store)?;
        if full.len() >= usize::try_from(out_bytes).unwrap_or(0) {
            let why = format!("{}: the name is too long", String::from_utf8_lossy(&full));
            return Err(Failure::new(codes::CANTOPEN, why));
        }
        // SAFETY: it fits, with its zero.
        unsafe {
            ptr::copy_nonoverlapping(full.as_ptr(), out.cast(), full.len());
            *out.add(full.len()) = 0;
        }
        Ok(())
    })
}

unsafe extern "C" fn last_error(_: *mut Vfs, out_bytes: c_int, out: *mut c_char) -> c_int {
    let room = usize::try_from(out_bytes).unwrap_or(0);
    if room > 0 && !out.is_null() {
        let message = LAST_ERROR.with_borrow(String::clone);
        let len = message.len().min(room - 1);
        // SAFETY: shorter than `out`.
        unsafe {
            ptr::copy_nonoverlapping(message.as_ptr(), out.cast(), len);
            *out.add(len) = 0;
        }
    }
    codes::OK
}

/// Defines functions that call those of the default file system.
macro_rules! forward {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty, $none:expr;)*) => {$(
        unsafe extern "C" fn $name(_: *mut Vfs, $($arg: $type),*) -> $out {
            let Some(registered) = REGISTERED.get() else { return $none };
            // SAFETY: the arguments are SQLite's own.
            unsafe {
                match (*registered.default_vfs).$name {
                    Some(function) => function(registered.default_vfs, $($arg),*),
                    None => $none,
                }
            }
        }
    )*};
}

forward! {
    dl_open(name: *const c_char) -> *mut c_void, ptr::null_mut();
    dl_error(bytes: c_int, out: *mut c_char) -> (), Default::default();
    dl_sym(library: *mut c_void, name: *const c_char) -> *mut c_void, ptr::null_mut();
    dl_close(library: *mut c_void) -> (), Default::default();
    randomness(bytes: c_int, out: *mut c_char) -> c_int, 0;
    sleep(microseconds: c_int) -> c_int, 0;
    current_time(out: *mut f64) -> c_int, codes::ERROR;
    current_time_i64(out: *mut i64) -> c_int, codes::ERROR;
}

unsafe extern "C" fn close(file: *mut OpenFile) -> c_int {
    run(|| {
        // SAFETY: the file was opened, and SQLite does not use it any more.
        unsafe {
            (*file).methods = ptr::null();
            drop(Box::from_raw((*file).file));
        }
        Ok(())
    })
}

unsafe extern "C" fn read(file: *mut OpenFile, out: *mut c_void, bytes: c_int, at: i64) -> c_int {
    run(|| {
        let len = usize::try_from(bytes).unwrap_or(0);
        // SAFETY: SQLite's buffer has that many bytes; they are zeroed before a slice is made.
        let into = unsafe {
            ptr::write_bytes(out.cast::<u8>(), 0, len);
            std::slice::from_raw_parts_mut(out.cast::<u8>(), len)
        };
        // SAFETY: an open file.
        let read = unsafe { file_of(file)? }.read(offset(at)?, into)?;
        match read < len {
            true => Err(Failure::new(codes::IOERR_SHORT_READ, "")),
            false => Ok(()),
        }
    })
}

unsafe extern "C" fn write(
    file: *mut OpenFile,
    from: *const c_void,
    bytes: c_int,
    at: i64,
) -> c_int {
    run(|| {
        let len = usize::try_from(bytes).unwrap_or(0);
        // SAFETY: SQLite's buffer has that many bytes, and the file is open.
        unsafe {
            let bytes = std::slice::from_raw_parts(from.cast::<u8>(), len);
            file_of(file)?.write(offset(at)?, bytes)
        }
    })
}

unsafe extern "C" fn truncate(file: *mut OpenFile, len: i64) -> c_int {
    // SAFETY: an open file.
    run(|| unsafe { file_of(file)? }.truncate(offset(len)?))
}

unsafe extern "C" fn sync(file: *mut OpenFile, _flags: c_int) -> c_int {
    // SAFETY: an open file.
    run(|| unsafe { file_of(file)? }.sync())
}

unsafe extern "C" fn file_size(file: *mut OpenFile, out: *mut i64) -> c_int {
    run(|| {
        // SAFETY: an open file, and a place for the answer.
        unsafe { *out = i64::try_from(file_of(file)?.len()?).unwrap_or(i64::MAX) };
        Ok(())
    })
}

unsafe extern "C" fn lock(file: *mut OpenFile, level: c_int) -> c_int {
    // SAFETY: an open file.
    run(|| unsafe { file_of(file)? }.lock(LockLevel::from_raw(level)))
}

unsafe extern "C" fn unlock(file: *mut OpenFile, level: c_int) -> c_int {
    run(|| {
        // SAFETY: an open file.
        unsafe { file_of(file)? }.unlock(LockLevel::from_raw(level));
        Ok(())
    })
}

unsafe extern "C" fn check_reserved_lock(file: *mut OpenFile, out: *mut c_int) -> c_int {
    run(|| {
        // SAFETY: an open file, and a place for the answer.
        unsafe { *out = file_of(file)?.is_reserved()?.into() };
        Ok(())
    })
}

unsafe extern "C" fn file_control(file: *mut OpenFile, number: c_int, arg: *mut c_void) -> c_int {
    let Some(registered) = REGISTERED.get() else { return codes::NOTFOUND };
    if number == codes::FCNTL_VFSNAME {
        // SAFETY: the argument is a place for a string.
        unsafe { *arg.cast() = registered.api.to_sqlite_string("draconis") };
        return codes::OK;
    }
    // SAFETY: the argument of the number, as SQLite defines it; an open file.
    unsafe {
        if number == codes::FCNTL_PRAGMA {
            return match file_of(file) {
                Ok(file) => pragma(file, registered.api, arg.cast()),
                Err(failure) => run(|| Err(failure)),
            };
        }
        let control = match number {
            codes::FCNTL_SYNC if arg.is_null() => Control::Sync(None),
            codes::FCNTL_SYNC => Control::Sync(Some(bytes_of(arg.cast_const().cast()))),
            codes::FCNTL_COMMIT_PHASETWO => Control::CommitPhaseTwo,
            codes::FCNTL_BEGIN_ATOMIC_WRITE => Control::BeginAtomicWrite,
            codes::FCNTL_COMMIT_ATOMIC_WRITE => Control::CommitAtomicWrite,
            codes::FCNTL_ROLLBACK_ATOMIC_WRITE => Control::RollbackAtomicWrite,
            _ => return codes::NOTFOUND,
        };
        run(|| match file_of(file)?.control(control)? {
            Answer::Unknown => Err(Failure::new(codes::NOTFOUND, "")),
            _ => Ok(()),
        })
    }
}

/// Answers `SQLITE_FCNTL_PRAGMA`: the argument has the places of the answer, the name and the value.
///
/// # Safety
/// As SQLite defines the argument.
unsafe fn pragma(file: &mut dyn File, api: Api, arg: *mut *mut c_char) -> c_int {
    // SAFETY: three strings, of which the first is written and the last may be null.
    let text = |index: usize| unsafe {
        let text = *arg.add(index);
        (!text.is_null()).then(|| String::from_utf8_lossy(bytes_of(text)).into_owned())
    };
    let (Some(name), value) = (text(1), text(2)) else { return codes::NOTFOUND };
    let mut answer = Answer::Unknown;
    let code = run(|| {
        answer = file.control(Control::Pragma(&name, value.as_deref()))?;
        Ok(())
    });
    let answer = match (code, answer) {
        (codes::OK, Answer::Unknown) => return codes::NOTFOUND,
        (codes::OK, Answer::Done) => return codes::OK,
        (codes::OK, Answer::Text(text)) => text,
        _ => LAST_ERROR.with_borrow(String::clone),
    };
    // SAFETY: the place of the answer; SQLite frees the string.
    unsafe { *arg = api.to_sqlite_string(&answer) };
    code
}

unsafe extern "C" fn sector_size(_: *mut OpenFile) -> c_int {
    SECTOR_BYTES
}

unsafe extern "C" fn device_characteristics(_: *mut OpenFile) -> c_int {
    codes::IOCAP_SAFE_APPEND
        | codes::IOCAP_SEQUENTIAL
        | codes::IOCAP_POWERSAFE_OVERWRITE
        | codes::IOCAP_BATCH_ATOMIC
}

/// Entry point for a SQLite that is linked into the program: pass it to `sqlite3_auto_extension`.
/// The file system is there once any connection was opened.
///
/// # Safety
/// Called by SQLite.
pub unsafe extern "C" fn draconis_sqlite_auto_init(
    db: *mut c_void,
    message: *mut *mut c_char,
    table: *const c_void,
) -> c_int {
    run(|| {
        let table = table.cast();
        // SAFETY: SQLite calls.
        unsafe {
            register(db, table).inspect_err(|failure| set_error_message(message, table, failure))
        }
    })
}

/// Entry points of the loadable extension.
#[cfg(feature = "loadable")]
mod loadable {
    use super::*;

    /// The name that SQLite derives from `libdraconis_sqlite.so`.
    ///
    /// # Safety
    /// Called by SQLite.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn sqlite3_draconissqlite_init(
        db: *mut c_void,
        message: *mut *mut c_char,
        table: *const c_void,
    ) -> c_int {
        // SAFETY: SQLite calls.
        match unsafe { draconis_sqlite_auto_init(db, message, table) } {
            // A file system cannot be unloaded.
            codes::OK => codes::OK_LOAD_PERMANENTLY,
            code => code,
        }
    }

    /// The name that SQLite tries first, for a library file of any name.
    ///
    /// # Safety
    /// Called by SQLite.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn sqlite3_extension_init(
        db: *mut c_void,
        message: *mut *mut c_char,
        table: *const c_void,
    ) -> c_int {
        // SAFETY: SQLite calls.
        unsafe { sqlite3_draconissqlite_init(db, message, table) }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use rusqlite::ffi;

    use super::*;

    /// The structures beside those that were generated from SQLite's header.
    #[test]
    fn structures_are_those_of_sqlite() {
        macro_rules! same {
            ($own:ty, $theirs:ty, $($field:ident $name:ident),*) => {
                $(assert_eq!(offset_of!($own, $field), offset_of!($theirs, $name));)*
            };
        }
        same!(Vfs, ffi::sqlite3_vfs, file_bytes szOsFile, max_path_bytes mxPathname, name zName,
            open xOpen, full_pathname xFullPathname, dl_open xDlOpen, randomness xRandomness,
            current_time xCurrentTime, last_error xGetLastError,
            current_time_i64 xCurrentTimeInt64);
        same!(IoMethods, ffi::sqlite3_io_methods, close xClose, sync xSync, lock xLock,
            file_control xFileControl, device_characteristics xDeviceCharacteristics);
        assert_eq!(codes::OPEN_SUPER_JOURNAL, ffi::SQLITE_OPEN_SUPER_JOURNAL);
        assert_eq!(codes::IOERR_BEGIN_ATOMIC, ffi::SQLITE_IOERR_BEGIN_ATOMIC);
        assert_eq!(codes::IOERR_DATA, ffi::SQLITE_IOERR_DATA);
        assert_eq!(codes::READONLY_DBMOVED, ffi::SQLITE_READONLY_DBMOVED);
        assert_eq!(codes::FCNTL_ROLLBACK_ATOMIC_WRITE, ffi::SQLITE_FCNTL_ROLLBACK_ATOMIC_WRITE);
        assert_eq!(codes::IOCAP_BATCH_ATOMIC, ffi::SQLITE_IOCAP_BATCH_ATOMIC);
    }
}
