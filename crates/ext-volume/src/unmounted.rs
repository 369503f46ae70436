//! Reading interface for `draconis-ext-offline`, which works on whole unmounted volumes.
//!
//! | module | promises |
//! |---|---|
//! | `backup` | superblocks that stand in for a damaged one; nothing is written |
//! | `blocks` | reads without a cache, the cache with its checksums by role, changes kept in memory |
//! | `dir` | entries of one directory block, read and repacked; names as Linux compares them |
//! | `journal` | a journal's blocks and transactions; a volume after replay, in memory or on its disk |
//! | `map` | block maps of both formats, by one walk that a visitor guides |
//! | `mmp` | whether a tool has claimed the volume |
//! | `options`, `volume` | the open volume itself |
//! | `reader` | inodes, contents and entries by number, without locks |
//!
//! Law 1: nothing here changes an open [`Volume`](crate::Volume); all writes go to a disk by its own
//! calls.
//! Law 2: it has no other user, so it changes with its user: it is no part of the library's promise.

pub mod backup {
    pub use crate::backup::{
        Backup, SuperblockPlace, UsableVolume, block_bytes, find, is_interrupted, mend_one_bit,
        none_found, open_superblock, put, put_as_primary,
    };
}
pub mod blocks {
    pub use crate::blocks::BlockStore;
    pub mod checksums {
        pub use crate::blocks::checksums::MetadataChecksums;
    }
    pub mod cow_disk {
        pub use crate::blocks::cow_disk::CowDisk;
    }
    pub mod data {
        pub use crate::blocks::data::{CHUNK_BYTES, SharedBytes};
    }
    pub mod role {
        pub use crate::blocks::role::{BlockChecksums, Role};
    }
    pub mod uncached {
        pub use crate::blocks::uncached::{
            read_bytes, read_raw_superblock, read_superblock, write_of,
        };
    }
}
pub mod dir {
    pub use crate::dir::MAX_NAME_BYTES;
    pub mod edit {
        pub mod index {
            pub use crate::dir::edit::index::{IndexBlockKind, fit_to_shape};
        }
        pub mod repack {
            pub use crate::dir::edit::repack::{convert_block, repack_linear};
        }
    }
    pub mod name_query {
        pub use crate::dir::name_query::{NameDisplay, NameQuery};
    }
}
pub mod journal {
    pub use crate::journal::{
        COPY_CHECKSUM, JournalFile, journal_inode_copy, open_journal, open_replayed, replay,
    };
    pub mod recovery {
        pub use crate::journal::recovery::{LogSource, LoggedBlock};
    }
}
pub mod map {
    pub use crate::map::{
        BlockLocation, BlockMap, MapNode, MapSource, MapVisitor, Run, SEGMENT_BLOCKS, map_of,
        map_of_any, max_file_bytes,
    };
    pub mod extents {
        pub use crate::map::extents::{Extents, empty_root};
    }
    pub mod pointers {
        pub use crate::map::pointers::{IndirectPath, Pointers, block_to_path, max_mapped_blocks};
    }
}
pub mod mmp {
    pub use crate::mmp::{MmpClaim, MmpClaimOptions, is_claimed_by_tool};
}
pub mod options {
    pub use crate::options::{OpenOptions, WriteOptions};
}
pub mod reader {
    pub use crate::reader::VolumeReader;
}
pub mod volume {
    pub use crate::volume::Volume;
}
