//! What a group waits for while a store that is nearly full is cleaned, in device time.

use draconis_device::sim::SimDisk;
use draconis_objects::{
    CreateOptions, Group, Hint, LayoutKind, OpenOptions, Profile, Store, Ticket,
};

const BLOCK: u64 = 4096;

/// Every group is durable before the next. No group cleans until there is room again: what
/// one finishes is little, even of segments in which hardly anything is alive.
#[test]
fn waits_are_bounded_while_segments_are_cleaned() {
    let (disk, clock) = SimDisk::ssd(96 << 20, 1);
    let profile = Profile {
        layout: LayoutKind::Cow,
        page_bytes: 4096,
        segment_bytes: 128 << 10,
        queue_depth: 32,
    };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    let store = Store::open(disk, &OpenOptions::default()).unwrap();
    let new = store.new_object();
    let id = new.id();
    let mut group = Group::new();
    group.create(new, Hint::Unknown);
    store.submit(group, &[]).unwrap();
    let write = |block: u64| -> Ticket {
        let mut group = Group::new();
        group.write(id, block * BLOCK, &[7; BLOCK as usize]);
        store.submit(group, &[]).unwrap()
    };
    let blocks = (96 << 20) / BLOCK * 70 / 100;
    for block in 0..blocks {
        write(block);
    }
    store.sync().unwrap();

    let mut dice = 88_172_645_463_325_252_u64;
    let (mut waited_ns, mut cleaned_at_once) = (vec![], 0);
    for _ in 0..blocks {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        let (before_ns, before) = (clock.now_ns(), store.info().counters);
        let ticket = write(dice % blocks);
        store.wait(ticket).unwrap();
        waited_ns.push(clock.now_ns() - before_ns);
        cleaned_at_once = cleaned_at_once.max(store.info().counters.cleaned - before.cleaned);
    }
    let cleaned = store.info().counters.cleaned;
    assert!(cleaned > 500, "{cleaned} segments cleaned: nothing to see");
    assert!(cleaned_at_once <= 8, "one group finished {cleaned_at_once} segments");
    waited_ns.sort_unstable();
    let at = |part: f64| waited_ns[((waited_ns.len() - 1) as f64 * part) as usize];
    let (half, most, longest) = (at(0.5), at(0.999), at(1.0));
    assert!(most <= half * 20, "half wait {half} ns, a thousandth more than {most} ns");
    assert!(longest <= half * 100, "half wait {half} ns, one {longest} ns");
    println!(
        "half {half} most {most} longest {longest} cleaned {cleaned} at once {cleaned_at_once}"
    );
}
