//! Volumes and stores for programs in C: what `draconis.h` declares.
//!
//! ```text
//!   C ──▶ extern "C" fn ──▶ error::answer: no panic passes, failures become errno and text
//!            │ raw: the only place where what C passed is believed
//!            ▼
//!         draconis_access: Volume, File, Store
//! ```
//!
//! Law 1: no panic crosses: it becomes ENOTRECOVERABLE and a text.
//! Law 2: a handle is used up by its `_close` or `_free` and by nothing else; each is of one heap,
//! ours.
//! Law 3: what a function returns for is written to its out pointers; a failure leaves them NULL
//! or zero.
//! Law 4: unsafe code is in `raw`.

#![allow(non_camel_case_types, reason = "they are called so in C")]

mod error;
mod keys;
mod maintenance;
mod raw;
mod store;
mod volume;

pub use error::*;
pub use keys::*;
pub use maintenance::*;
pub use store::*;
pub use volume::*;
