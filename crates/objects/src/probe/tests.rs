use std::sync::Arc;

use draconis_device::MemoryDisk;
use draconis_testkit::sim::{Clock, SimDisk, Ssd, SsdParameters};
use draconis_testkit::{Event, RecordDisk};

use super::*;
use crate::superblock::Geometry;

fn measure(disk: &Arc<SimDisk>) -> ProbeResults {
    let region = Extent::new(0, 48 << 20);
    probe(&**disk, &|| disk.clock().now_ns(), region, 0, &mut |_, _| {}).unwrap()
}

#[test]
fn hard_disk_gets_log_layout() {
    for seed in [1, 2] {
        let (disk, _) = SimDisk::hdd(8 << 30, seed);
        let measured = measure(&disk);
        let (profile, why) = measured.profile(8 << 30);
        assert_eq!(profile.layout, LayoutKind::Log, "{measured:?}");
        assert_eq!(profile.page_bytes, 4096);
        assert!((16 << 20..=64 << 20).contains(&profile.segment_bytes), "{profile:?} {why:?}");
        assert_eq!(why.len(), 4);
        assert!(why[0].contains("distance costs ("), "{why:?}");
    }
}

fn check_page_is_detected(page_bytes: u32, len: u64) {
    let parameters = SsdParameters { page_bytes, ..SsdParameters::p3700(len) };
    let disk = SimDisk::new(Ssd::new(parameters), &Clock::new());
    let measured = measure(&disk);
    let (profile, why) = measured.profile(len);
    assert_eq!(profile.layout, LayoutKind::Cow, "{measured:?}");
    assert_eq!(profile.page_bytes, page_bytes, "{len}: {measured:?}");
    assert!(profile.queue_depth >= 16, "{measured:?}");
    assert!(u64::from(profile.segment_bytes) <= len / 100, "{profile:?} {why:?}");
}

#[test]
fn flash_gets_cow_layout_and_page_size() {
    [4096, 8192, 16384]
        .into_iter()
        .for_each(|page_bytes| check_page_is_detected(page_bytes, 128 << 20));
}

#[test]
#[ignore = "long: a minute: models of flash with three page sizes"]
fn flash_with_small_pages_gets_cow_layout() {
    [512, 1024, 2048]
        .into_iter()
        .for_each(|page_bytes| check_page_is_detected(page_bytes, 128 << 20));
}

#[test]
#[ignore = "long: half a minute: models of flash with a write buffer"]
fn write_buffer_does_not_hide_page_size() {
    check_page_is_detected(1024, 2 << 30);
}

#[test]
fn page_size_is_at_least_device_page() {
    let parameters = SsdParameters { page_bytes: 512, ..SsdParameters::p3700(128 << 20) };
    let disk = SimDisk::new(Ssd::new(parameters), &Clock::new());
    let region = Extent::new(0, 48 << 20);
    let clock = || disk.clock().now_ns();
    let measured = probe(&*disk, &clock, region, 4096, &mut |_, _| {}).unwrap();
    let (profile, why) = measured.profile(128 << 20);
    assert_eq!((profile.page_bytes, &*why[1]), (4096, "page 4 KiB: the device says so"));
    // Nothing smaller is measured.
    assert_eq!(measured.misalignment_cost[..3], [0.0; 3]);
}

/// Returns how many of 500 disks with a cost of `is` show a boundary, if each measurement is
/// wrong by up to `noise`.
fn count_detected_boundaries(unit: u32, is: f64, noise: f64) -> usize {
    let nth = BOUNDARY_UNITS.iter().position(|it| *it == unit).unwrap();
    let mut random = 1u64;
    let mut rate = |rate: f64| {
        random = crate::codec::mix_bits(random);
        rate * (1.0 + noise * ((random >> 11) as f64 / (1u64 << 52) as f64 - 1.0))
    };
    let mut felt = 0;
    for _ in 0..500 {
        let across = measure_until_stable(unit, &mut |_| Ok(rate(is) / rate(1.0))).unwrap();
        felt += usize::from(across > min_boundary_cost(BOUNDARY_UNITS[nth]));
    }
    felt
}

#[test]
fn noisy_disk_is_measured_until_stable() {
    assert_eq!(
        [count_detected_boundaries(8192, 1.0, 0.1), count_detected_boundaries(2048, 1.0, 0.05)],
        [0, 0]
    );
    assert_eq!(
        [count_detected_boundaries(8192, 2.0, 0.2), count_detected_boundaries(2048, 1.6, 0.2)],
        [500, 500]
    );
    // In doubt a page has 4 KiB.
    assert!(
        count_detected_boundaries(8192, 1.0, 0.6) < 25,
        "{}",
        count_detected_boundaries(8192, 1.0, 0.6)
    );
    assert!(
        count_detected_boundaries(2048, 1.0, 0.6) > 300,
        "{}",
        count_detected_boundaries(2048, 1.0, 0.6)
    );
}

/// Returns results of disks with arbitrary disturbance.
fn arbitrary_probe_results(reported_unit_bytes: u32) -> Vec<ProbeResults> {
    let mut all = vec![];
    for read_bytes_per_s in [0, 1, 5_000_000, u64::MAX] {
        for (near, far_read_ns) in [(0, 0), (1000, 1001), (0, u64::MAX), (u64::MAX, 0)] {
            for page_bytes in [512, 1024, 4096, 32768, 65536] {
                all.push(ProbeResults {
                    write_bytes_per_s: read_bytes_per_s,
                    read_bytes_per_s,
                    near_read_ns: near,
                    far_read_ns,
                    near_write_ns: near,
                    far_write_ns: far_read_ns,
                    flush_ns: far_read_ns,
                    reads_per_s: [read_bytes_per_s; 6],
                    misalignment_cost: [0.0, 9.0, f64::INFINITY, f64::NAN, 9.0, 9.0],
                    reported_unit_bytes,
                    page_bytes: page_bytes.max(reported_unit_bytes),
                });
            }
        }
    }
    all
}

#[test]
fn any_probe_result_gives_valid_profile() {
    // The shortest region, others, and one that ends within a segment.
    for len in [2 * REGION_BYTES_MIN, 13 << 20, (32 << 20) + 4096, 256 << 20] {
        for (told_bytes, measured) in
            [0, 512, 4096, 65536].map(|told| (told, arbitrary_probe_results(told)))
        {
            for measured in measured {
                let (profile, why) = measured.profile(len);
                let made = Geometry::for_disk(&profile, len);
                assert!(made.is_ok(), "{len} {made:?} {profile:?} {why:?}");
                assert!(profile.page_bytes >= told_bytes, "{profile:?}");
                // So that the capacity does not depend on the measurement.
                let segments = len / u64::from(profile.segment_bytes);
                assert!(segments >= 128 || told_bytes > 4096, "{len} {profile:?} {why:?}");
            }
        }
    }
}

#[test]
fn probe_writes_only_its_region() {
    let disk = RecordDisk::new(MemoryDisk::new(vec![0; 8 << 20], 512));
    let region = Extent::new(1_000_000, 6 << 20);
    // A clock that advances at each call.
    let time = std::cell::Cell::new(0);
    let clock = || time.replace(time.get() + 2_000_000);
    let mut steps = vec![];
    let measured = probe(&disk, &clock, region, 0, &mut |done, all| steps.push((done, all)));
    measured.unwrap();
    assert_eq!(steps.last(), Some(&(12, 12)));
    for event in disk.take_events() {
        if let Event::Group { writes, .. } = event {
            for (at, bytes) in writes {
                let end = at + bytes.len() as u64;
                assert!(at >= region.start_bytes && end <= region.end_bytes().unwrap());
            }
        }
    }
    let short = Extent::new(0, REGION_BYTES_MIN - 1);
    let refused = probe(&disk, &clock, short, 0, &mut |_, _| {}).unwrap_err();
    assert!(matches!(refused, Error::Misuse(_)));
}
