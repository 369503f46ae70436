//! scratch
use std::sync::Arc;
use std::time::Instant;
use draconis_device::sim::SimDisk;
use draconis_device::{Disk, Extent, View};
use draconis_objects::*;
fn main() {
    let mut args: std::collections::HashMap<String, String> = std::env::args()
        .skip(1)
        .map(|a| { let (k, v) = a.split_once('=').unwrap(); (k.to_owned(), v.to_owned()) })
        .collect();
    let mut get = |k: &str, d: &str| args.remove(k).unwrap_or(d.to_owned());
    let num = |s: String| -> u64 {
        let (n, m) = match s.as_bytes().last() {
            Some(b'K') => (&s[..s.len() - 1], 1 << 10),
            Some(b'M') => (&s[..s.len() - 1], 1 << 20),
            Some(b'G') => (&s[..s.len() - 1], 1 << 30),
            _ => (&s[..], 1),
        };
        n.parse::<u64>().unwrap() * m
    };
    let bytes = num(get("store", "4G"));
    let seg = num(get("seg", "1M")) as u32;
    let fill = num(get("fill", "80"));
    let turns = num(get("turns", "4"));
    let block = num(get("block", "4096"));
    let every = num(get("sync", "0"));
    let layout = get("layout", "cow");
    let pattern = get("pattern", "uniform,skew");
    let dev = get("dev", "ssd");
    assert!(args.is_empty(), "{args:?}");
    let (disk, clock) = match &*dev {
        "ssd" => SimDisk::ssd(bytes, 1),
        _ => SimDisk::hdd(bytes, 1),
    };
    let layout = if layout == "cow" { LayoutKind::Cow } else { LayoutKind::Log };
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: seg, queue_depth: 32 };
    let view: Arc<dyn Disk> = Arc::new(View::new(disk.clone(), Extent::new(0, bytes)).unwrap());
    Store::create(view.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    let store = Store::open(view.clone(), &OpenOptions { cache_bytes: 256 << 20, read_only: false }).unwrap();
    let info = store.info();
    let len = u64::from(info.segments) * u64::from(seg) * fill / 100;
    let blocks = len / block;
    let new = store.new_object();
    let id = new.id();
    let mut g = Group::new();
    g.create(new, Hint::Unknown);
    store.submit(g, &[]).unwrap();
    let payload = vec![0u8; block as usize];
    let start = Instant::now();
    for n in 0..blocks {
        let mut g = Group::new();
        g.write(id, n * block, &payload);
        store.submit(g, &[]).unwrap();
    }
    store.sync().unwrap();
    println!("filled {blocks} blocks in {:.1} s cpu, {:.1} s device", start.elapsed().as_secs_f64(), clock.now_ns() as f64 / 1e9);
    let mut x = 88172645463325252u64;
    let mut below = move |n: u64| { x ^= x << 13; x ^= x >> 7; x ^= x << 17; x % n };
    for p in pattern.split(',') {
        for turn in 0..turns {
            let before = store.info();
            let start = Instant::now();
            let dev0 = clock.now_ns();
            let mut lat: Vec<u64> = vec![];
            let mut slow = 0u64;
            let mut cpu: Vec<u64> = vec![];
            for n in 0..blocks {
                let b = match p {
                    "uniform" => below(blocks),
                    "seq" => n,
                    _ if below(10) < 9 => below(blocks / 10),
                    _ => blocks / 10 + below(blocks - blocks / 10),
                };
                let mut g = Group::new();
                g.write(id, b * block, &payload);
                let c0 = if every == 1 { Some(store.info().counters) } else { None };
                let st0 = disk.statistics();
                let t = Instant::now();
                let v = clock.now_ns();
                let ticket = store.submit(g, &[]).unwrap();
                if every > 0 && n % every == every - 1 {
                    store.wait(ticket).unwrap();
                    lat.push(clock.now_ns() - v);
                    let took = clock.now_ns() - v;
                    if let Some(c0) = c0 && took > 220_000 {
                        slow += 1;
                        if slow % 97 == 1 || took > 900_000 {
                            let c = store.info().counters;
                            let st = disk.statistics();
                            eprintln!("{took} ns: ckpt {} cleaned {} moved {} index {} written {} commits {} {:?} {:?}", c.checkpoints - c0.checkpoints, c.cleaned - c0.cleaned, c.moved_bytes - c0.moved_bytes, c.index_bytes - c0.index_bytes, c.written_bytes - c0.written_bytes, c.commits - c0.commits, st0, st);
                        }
                    }
                }
                cpu.push(t.elapsed().as_nanos() as u64);
            }
            store.sync().unwrap();
            let after = store.info();
            let d = |f: fn(&Counters) -> u64| (f(&after.counters) - f(&before.counters)) as f64;
            let pay = d(|c| c.payload_bytes);
            let pct = |v: &mut Vec<u64>| {
                v.sort_unstable();
                if v.is_empty() { return String::new() }
                let at = |q: f64| v[((v.len() - 1) as f64 * q) as usize] as f64 / 1e3;
                format!("p50 {:.1} p99 {:.1} p99.9 {:.1} max {:.1} us", at(0.5), at(0.99), at(0.999), at(1.0))
            };
            println!(
                "{p} turn {turn}: data {:.3} all {:.3} index {:.3}; cleaned {} ckpts {} free {} used {:.4}; {:.1} s cpu, {:.2} s device = {:.1} MB/s; cpu {}; dev {}",
                1.0 + d(|c| c.moved_bytes) / pay,
                d(|c| c.written_bytes) / pay,
                d(|c| c.index_bytes) / pay,
                d(|c| c.cleaned), d(|c| c.checkpoints), after.free_segments, after.used_bytes as f64 / (after.segments as f64 * seg as f64),
                start.elapsed().as_secs_f64(),
                (clock.now_ns() - dev0) as f64 / 1e9,
                pay / ((clock.now_ns() - dev0) as f64 / 1e9) / 1e6,
                pct(&mut cpu), pct(&mut lat)
            );
        }
    }
}
