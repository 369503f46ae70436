//! The exchange heap: blocks that two processes share.
//!
//! ```text
//!   a slot             of an arena that two processes map: copied, never borrowed
//!   pool memory        mapped by two processes and written by one: copied, not changed
//! ```

pub mod arena;
mod page_pool;

pub use page_pool::{PagePool, PoolBuffer};
