//! Conformance of the layouts of this crate and of the example; refusal of layouts that do not fit
//! or are not registered.

use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_objects::layout::{Layout, PayloadKind, StoreDimensions, conform, register};
use draconis_objects::{CreateOptions, Error, LayoutKind, OpenOptions, Profile, Store};

#[allow(dead_code, reason = "its main is for those who run it")]
#[path = "../examples/zoned.rs"]
mod zoned;

#[test]
fn layouts_of_our_own() {
    [LayoutKind::Log, LayoutKind::Cow, LayoutKind::Bucket].into_iter().for_each(conform::check_all);
}

#[test]
fn the_example_is_a_layout() {
    conform::check_all(register(zoned::NUMBER, zoned::make).unwrap());
}

fn profile(layout: LayoutKind) -> CreateOptions {
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 64 << 10, queue_depth: 8 };
    CreateOptions { profile, id: 1 }
}

fn disk() -> Arc<dyn Disk> {
    Arc::new(MemoryDisk::new(vec![0; 4 << 20], 512))
}

#[test]
fn a_store_whose_layout_is_not_known_is_refused_by_its_number() {
    let disk = disk();
    let refused = |done: draconis_objects::Result<()>| match done {
        Err(Error::NotAStore(why)) => assert!(why.contains("layout, number 999,"), "{why}"),
        other => panic!("{other:?}"),
    };
    refused(Store::create(disk.clone(), &profile(LayoutKind::Other(999))));
    let kind = register(998, zoned::make).unwrap();
    Store::create(disk.clone(), &profile(kind)).unwrap();
    let store = Store::open(disk.clone(), &OpenOptions::default()).unwrap();
    assert_eq!(store.info().profile.layout, LayoutKind::Other(998));
    assert_eq!(kind.to_string(), "number 998");
    assert!(matches!(register(255, zoned::make), Err(Error::Misuse(_))));
}

/// A layout with the fault of its number.
struct Wrong<const WHAT: u16>(StoreDimensions);

impl<const WHAT: u16> Layout for Wrong<WHAT> {
    fn site(&self) -> &StoreDimensions {
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

    fn read_bytes(&self) -> usize {
        if WHAT == 6 { 0 } else { 64 << 10 }
    }

    fn reads_ahead(&self) -> usize {
        if WHAT == 7 { usize::MAX } else { 1 }
    }

    fn node_bytes(&self) -> usize {
        if WHAT == 8 { 1 << 20 } else { 4096 }
    }

    fn chunk_bytes(&self) -> usize {
        if WHAT == 9 { 0 } else { 4096 }
    }
}

fn wrong<const WHAT: u16>(site: &StoreDimensions) -> Box<dyn Layout> {
    Box::new(Wrong::<WHAT>(*site))
}

#[test]
fn a_layout_that_does_not_fit_is_refused_before_anything_is_written() {
    type Make = fn(&StoreDimensions) -> Box<dyn Layout>;
    let all: [Make; 10] = [
        wrong::<0>, wrong::<1>, wrong::<2>, wrong::<3>, wrong::<4>, wrong::<5>, wrong::<6>,
        wrong::<7>, wrong::<8>, wrong::<9>,
    ];
    for (nth, make) in (0u16..).zip(all) {
        let disk = disk();
        Store::create(disk.clone(), &profile(LayoutKind::Log)).unwrap();
        let kind = register(400 + nth, make).unwrap();
        let done = Store::create(disk.clone(), &profile(kind));
        assert!(matches!(done, Err(Error::Misuse(_))), "{nth}: {done:?}");
        // The older store is still there.
        let store = Store::open(disk, &OpenOptions::default()).unwrap();
        assert_eq!(store.info().profile.layout, LayoutKind::Log, "{nth}");
    }
    let good = register(500, wrong::<77>).unwrap();
    Store::create(disk(), &profile(good)).unwrap();
}
