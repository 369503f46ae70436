//! Block maps: those of the live volume, and whole new ones.

pub(crate) mod build;
pub(crate) mod build_extents;

pub(crate) use draconis_ext_volume::unmounted::map::{
    BlockLocation, BlockMap, MapNode, MapSource, MapVisitor, Run, SEGMENT_BLOCKS, extents, map_of,
    map_of_any, max_file_bytes, pointers,
};
