//! Conformance of the layouts of this crate and of the example; refusal of layouts that do not fit
//! or are not registered.

use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_objects::conform;
use draconis_objects::layout::{Layout, PayloadKind, StoreDimensions, register_layout};
use draconis_objects::{CreateOptions, Error, LayoutKind, OpenOptions, Profile, Store};

#[allow(dead_code, reason = "its main is for those who run it")]
#[path = "../examples/zoned.rs"]
mod zoned;

#[test]
fn built_in_layouts_conform() {
    [LayoutKind::Log, LayoutKind::Cow, LayoutKind::Bucket].into_iter().for_each(conform::check_all);
}

#[test]
fn zoned_example_layout_conforms() {
    conform::check_all(register_layout(zoned::LAYOUT_NUMBER, zoned::make_zoned_layout).unwrap());
}

fn create_options(layout: LayoutKind) -> CreateOptions {
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 64 << 10, queue_depth: 8 };
    CreateOptions { profile, id: 1 }
}

fn memory_disk() -> Arc<dyn Disk> {
    Arc::new(MemoryDisk::new(vec![0; 4 << 20], 512))
}

#[test]
fn unknown_layout_number_is_refused() {
    let disk = memory_disk();
    let refused = |done: draconis_objects::Result<()>| match done {
        Err(Error::NotAStore(why)) => assert!(why.contains("layout, number 999,"), "{why}"),
        other => panic!("{other:?}"),
    };
    refused(Store::create(disk.clone(), &create_options(LayoutKind::Other(999))));
    let kind = register_layout(998, zoned::make_zoned_layout).unwrap();
    Store::create(disk.clone(), &create_options(kind)).unwrap();
    let store = Store::open(disk.clone(), &OpenOptions::default()).unwrap();
    assert_eq!(store.info().profile.layout, LayoutKind::Other(998));
    assert_eq!(kind.to_string(), "number 998");
    assert!(matches!(register_layout(255, zoned::make_zoned_layout), Err(Error::Misuse(_))));
}

/// A layout with the fault of its number.
struct InvalidLayout<const WHAT: u16>(StoreDimensions);

impl<const WHAT: u16> Layout for InvalidLayout<WHAT> {
    fn dimensions(&self) -> &StoreDimensions {
        &self.0
    }

    fn streams(&self) -> usize {
        if WHAT == 0 { 17 } else { 3 }
    }

    fn stream_of(&self, kind: PayloadKind, _: bool) -> usize {
        if WHAT == 1 && kind == PayloadKind::ShortLived { 3 } else { 0 }
    }

    fn index_stream(&self) -> usize {
        if WHAT == 2 { 9 } else { 0 }
    }

    fn frame_bytes(&self) -> usize {
        if WHAT == 3 { usize::MAX } else { 64 << 10 }
    }

    fn log_bytes(&self) -> u64 {
        if WHAT == 4 { 0 } else { 64 << 10 }
    }

    fn commit_bytes(&self) -> usize {
        if WHAT == 5 { 1 << 30 } else { 4096 }
    }

    fn cleaner_read_bytes(&self) -> usize {
        if WHAT == 6 { 0 } else { 64 << 10 }
    }

    fn cleaner_reads_ahead(&self) -> usize {
        if WHAT == 7 { usize::MAX } else { 1 }
    }

    fn node_bytes(&self) -> usize {
        if WHAT == 8 { 1 << 20 } else { 4096 }
    }

    fn chunk_bytes(&self) -> usize {
        if WHAT == 9 { 0 } else { 4096 }
    }
}

fn make_invalid_layout<const WHAT: u16>(site: &StoreDimensions) -> Box<dyn Layout> {
    Box::new(InvalidLayout::<WHAT>(*site))
}

#[test]
fn invalid_layout_is_refused_before_writing() {
    type LayoutConstructor = fn(&StoreDimensions) -> Box<dyn Layout>;
    let all: [LayoutConstructor; 10] = [
        make_invalid_layout::<0>,
        make_invalid_layout::<1>,
        make_invalid_layout::<2>,
        make_invalid_layout::<3>,
        make_invalid_layout::<4>,
        make_invalid_layout::<5>,
        make_invalid_layout::<6>,
        make_invalid_layout::<7>,
        make_invalid_layout::<8>,
        make_invalid_layout::<9>,
    ];
    for (nth, make) in (0u16..).zip(all) {
        let disk = memory_disk();
        Store::create(disk.clone(), &create_options(LayoutKind::Log)).unwrap();
        let kind = register_layout(400 + nth, make).unwrap();
        let done = Store::create(disk.clone(), &create_options(kind));
        assert!(matches!(done, Err(Error::Misuse(_))), "{nth}: {done:?}");
        // The older store is still there.
        let store = Store::open(disk, &OpenOptions::default()).unwrap();
        assert_eq!(store.info().profile.layout, LayoutKind::Log, "{nth}");
    }
    let good = register_layout(500, make_invalid_layout::<77>).unwrap();
    Store::create(memory_disk(), &create_options(good)).unwrap();
}
