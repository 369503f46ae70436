//! The page: unit and alignment of private memory.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Clone)]
#[repr(C, align(4096))]
pub(super) struct Page([u8; ALIGN_BYTES]);

/// Alignment of every private block in bytes, as direct I/O requires.
pub const ALIGN_BYTES: usize = 4096;
