//! Errors for C: a negative errno, and a message per thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

use draconis_access::{Error, Result};
use rustix::io::Errno;

use crate::raw::null_error;

thread_local! {
    /// Message of this thread's last failure.
    static LAST_MESSAGE: RefCell<CString> = RefCell::default();
}

/// Returns the message of this thread's last failed call: the object, the failure, and the next
/// step where there is one. Empty if no call failed. Valid until the next failure in this thread;
/// must not be freed.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_error_message() -> *const c_char {
    // The pointer stays valid after the borrow ends.
    LAST_MESSAGE.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns the version of the library, such as "0.1.0". Must not be freed.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Runs a call that returns a count; returns the count or a negative errno.
pub fn run_returning_count(work: impl FnOnce() -> Result<u64>) -> i64 {
    let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let why = panic.downcast_ref::<String>().map(String::as_str);
        let why = why.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked");
        let text = format!("a defect of libdraconis: {why}; please tell its developers");
        // Dropping the panic's value could panic again, across the C boundary.
        std::mem::forget(panic);
        Err(Error::new(Errno::NOTRECOVERABLE, text))
    });
    match done {
        Ok(count) => i64::try_from(count).unwrap_or(i64::MAX),
        Err(Error { errno, message }) => {
            let bytes: Vec<u8> = message.bytes().filter(|byte| *byte != 0).collect();
            let text = CString::new(bytes).unwrap_or_default();
            let _ = LAST_MESSAGE.try_with(|last| *last.borrow_mut() = text);
            -i64::from(errno.raw_os_error())
        }
    }
}

/// Runs a call; returns 0 or a negative errno.
pub fn run(work: impl FnOnce() -> Result<()>) -> c_int {
    // Errnos fit in an int.
    run_returning_count(|| work().map(|()| 0)) as c_int
}

/// Refuses a NULL handle.
pub fn require<'a, T>(handle: Option<&'a T>, what: &str) -> Result<&'a T> {
    handle.ok_or_else(|| null_error(what))
}

/// Runs a call and stores its result in `out`, which holds `empty` if the call fails.
pub fn run_with_output<T>(
    out: Option<&mut MaybeUninit<T>>,
    empty: T,
    make: impl FnOnce() -> Result<T>,
) -> c_int {
    run(|| {
        let out = out.ok_or_else(|| null_error("the pointer to the result"))?;
        let out = out.write(empty);
        *out = make()?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last_message() -> String {
        LAST_MESSAGE.with(|last| CStr::to_string_lossy(&last.borrow()).into_owned())
    }

    #[test]
    fn panic_sets_errno_and_message() {
        let code = run(|| panic!("seven is {}", 7));
        assert_eq!(code, -Errno::NOTRECOVERABLE.raw_os_error());
        assert!(
            last_message().contains("a defect of libdraconis: seven is 7"),
            "{}",
            last_message()
        );
        assert_eq!(run(|| Ok(())), 0);
        assert!(last_message().contains("seven"), "success leaves the text");
    }

    #[test]
    fn error_sets_errno_and_message() {
        let mut out = MaybeUninit::new(7u64);
        assert_eq!(
            run_with_output(Some(&mut out), 0, || Err(Error::new(Errno::NOENT, "no\0ne"))),
            -2
        );
        assert_eq!(last_message(), "none");
        assert_eq!(run_with_output(None, 0u64, || Ok(1)), -Errno::INVAL.raw_os_error());
        assert_eq!(run_returning_count(|| Ok(5)), 5);
    }
}
