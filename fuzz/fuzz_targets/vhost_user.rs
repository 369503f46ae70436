//! Any guest memory: a ring of 16 descriptors at its start, and what the descriptors name.
#![no_main]

use std::sync::Arc;

use draconis_device::MemoryDisk;
use draconis_vhost_user::{Device, RingLayout, serve_ring_once};
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MEMORY_BYTES: usize = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    let ranges = [(GuestAddress(0), MEMORY_BYTES)];
    let Ok(memory) = GuestMemoryMmap::from_ranges(&ranges) else { return };
    let bytes = &bytes[..bytes.len().min(MEMORY_BYTES)];
    if memory.write_slice(bytes, GuestAddress(0)).is_err() {
        return;
    }
    let layout = RingLayout { size: 16, descriptors: 0, available: 0x100, used: 0x200 };
    let device = Device::new(Arc::new(MemoryDisk::new(vec![1; 1 << 16], 512)), "a");
    let _ = serve_ring_once(&device, &Arc::new(memory), layout);
});
