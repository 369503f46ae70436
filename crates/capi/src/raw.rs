//! What C passes as pointers.
//!
//! Law: these types are made by callers in C only, who promise what the header asks of them: a
//! text ends with NUL, and so many bytes as are said can be read or written until the call
//! returns. NULL is recognised.

use std::ffi::{CStr, c_char, c_void};

use draconis_access::{Error, Result};
use rustix::io::Errno;

/// A text that ends with NUL, or NULL.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct CStrArg(*const c_char);

/// Texts one behind the other, each as [`Text`], or NULL.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct CStrArrayArg(*const CStrArg);

/// Bytes to be read, or NULL.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Bytes(*const c_void);

/// Room to be filled, or NULL.
#[repr(transparent)]
pub struct OutBuffer(*mut c_void);

impl CStrArg {
    /// The text; `what` names it where there is none.
    pub fn get<'a>(self, what: &str) -> Result<&'a [u8]> {
        self.optional().ok_or_else(|| null_error(what))
    }

    /// The text, if there is one.
    pub fn optional<'a>(self) -> Option<&'a [u8]> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: the caller promises a text that ends with NUL and stays for the call.
        Some(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }
}

impl CStrArrayArg {
    /// So many texts; `what` names them where there are none.
    pub fn get<'a>(self, count: usize, what: &str) -> Result<Vec<&'a [u8]>> {
        if count == 0 {
            return Ok(vec![]);
        }
        let bytes = count.checked_mul(size_of::<CStrArg>());
        if self.0.is_null() || bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(null_error(what));
        }
        // SAFETY: the caller promises so many pointers that stay for the call.
        let all = unsafe { std::slice::from_raw_parts(self.0, count) };
        all.iter().map(|text| text.get(what)).collect()
    }
}

impl Bytes {
    /// So many bytes; `what` names them where there are none.
    pub fn get<'a>(self, len: usize, what: &str) -> Result<&'a [u8]> {
        if len == 0 {
            return Ok(&[]);
        }
        if self.0.is_null() || isize::try_from(len).is_err() {
            return Err(null_error(what));
        }
        // SAFETY: the caller promises so many bytes that stay for the call.
        Ok(unsafe { std::slice::from_raw_parts(self.0.cast(), len) })
    }
}

impl OutBuffer {
    /// So many bytes, all zero; `what` names them where there are none.
    pub fn get<'a>(self, len: usize, what: &str) -> Result<&'a mut [u8]> {
        if len == 0 {
            return Ok(&mut []);
        }
        if self.0.is_null() || isize::try_from(len).is_err() {
            return Err(null_error(what));
        }
        let at = self.0.cast::<u8>();
        // SAFETY: the caller promises room for so many bytes, which no other thread uses for the call.
        // What was never written is not looked at before it is.
        unsafe {
            at.write_bytes(0, len);
            Ok(std::slice::from_raw_parts_mut(at, len))
        }
    }
}

/// A pointer that must not be NULL.
pub fn null_error(what: &str) -> Error {
    Error::new(Errno::INVAL, format!("{what} is NULL"))
}
