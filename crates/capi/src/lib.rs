//! C interface for volumes and stores: the functions that `draconis.h` declares.
//!
//! ```text
//!   C ──▶ extern "C" fn ──▶ error::answer: no panic passes, failures become errno and text
//!            │ raw: converts the pointers that C passed
//!            ▼
//!         draconis_access: Volume, File, Store
//! ```
//!
//! Law 1: no panic crosses the boundary: it becomes ENOTRECOVERABLE and a message.
//! Law 2: only `_close` or `_free` consumes a handle; all handles are allocated on the library's
//! heap.
//! Law 3: results are written to out pointers; on failure these hold NULL or
//! zeros.
//! Law 4: all unsafe code is in `raw`.

#![allow(non_camel_case_types, reason = "they are called so in C")]

mod error;
mod keys;
mod maintenance;
mod place;
mod raw;
mod store;
mod volume;

pub use error::*;
pub use keys::*;
pub use maintenance::*;
pub use place::*;
pub use store::*;
pub use volume::*;
