//! Pointers passed by C callers.
//!
//! Law: only C callers create values of these types, and they guarantee what the header requires:
//! strings end with NUL, and the given number of bytes is readable or writable during the call.
//! NULL is detected.

use std::ffi::{CStr, c_char, c_void};

use draconis_access::{Error, Result};
use rustix::io::Errno;

/// A string that ends with NUL, or NULL.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct CStrArg(*const c_char);

/// An array of strings, or NULL.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct CStrArrayArg(*const CStrArg);

/// Bytes to read, or NULL.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Bytes(*const c_void);

/// A buffer to fill, or NULL.
#[repr(transparent)]
pub struct OutBuffer(*mut c_void);

impl CStrArg {
    /// Returns the string; the error for NULL names it `what`.
    pub fn get<'a>(self, what: &str) -> Result<&'a [u8]> {
        self.as_optional_bytes().ok_or_else(|| null_error(what))
    }

    /// Returns the string, if it is not NULL.
    pub fn as_optional_bytes<'a>(self) -> Option<&'a [u8]> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: the caller guarantees a string that ends with NUL and stays valid for the call.
        Some(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }
}

impl CStrArrayArg {
    /// Returns `count` strings; the error for NULL names them `what`.
    pub fn get<'a>(self, count: usize, what: &str) -> Result<Vec<&'a [u8]>> {
        if count == 0 {
            return Ok(vec![]);
        }
        let bytes = count.checked_mul(size_of::<CStrArg>());
        if self.0.is_null() || bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(null_error(what));
        }
        // SAFETY: the caller guarantees `count` pointers that stay valid for the call.
        let all = unsafe { std::slice::from_raw_parts(self.0, count) };
        all.iter().map(|text| text.get(what)).collect()
    }
}

impl Bytes {
    /// Returns `len` bytes; the error for NULL names them `what`.
    pub fn get<'a>(self, len: usize, what: &str) -> Result<&'a [u8]> {
        if len == 0 {
            return Ok(&[]);
        }
        if self.0.is_null() || isize::try_from(len).is_err() {
            return Err(null_error(what));
        }
        // SAFETY: the caller guarantees `len` bytes that stay valid for the call.
        Ok(unsafe { std::slice::from_raw_parts(self.0.cast(), len) })
    }
}

impl OutBuffer {
    /// Returns a buffer of `len` bytes, zeroed; the error for NULL names it `what`.
    pub fn get<'a>(self, len: usize, what: &str) -> Result<&'a mut [u8]> {
        if len == 0 {
            return Ok(&mut []);
        }
        if self.0.is_null() || isize::try_from(len).is_err() {
            return Err(null_error(what));
        }
        let at = self.0.cast::<u8>();
        // SAFETY: the caller guarantees `len` writable bytes that no other thread uses during the
        // call. They are zeroed before they are read.
        unsafe {
            at.write_bytes(0, len);
            Ok(std::slice::from_raw_parts_mut(at, len))
        }
    }
}

/// Returns the error for a NULL pointer.
pub fn null_error(what: &str) -> Error {
    Error::new(Errno::INVAL, format!("{what} is NULL"))
}
