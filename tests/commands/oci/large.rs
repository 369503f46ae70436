//! An image whose layers are much larger than the memory limit of the program.
//!
//! `make long-images MIB=10240` takes a larger one.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use draconis_device::Random;

use crate::common::{Draconis, has_tool};
use crate::oci::build::{OciLayout, run_and_capture};
use crate::oci::hostile::tar_entry_with_size;
use draconis_testkit::judge::assert_fsck_clean;

/// Memory limit of the program, for any size of the image.
const MAX_MEMORY_KIB: u64 = 256 << 10;
const MIB: u64 = 1 << 20;
const CHUNK_BYTES: u64 = 64 << 10;

/// Generated contents of a file; three quarters are compressible.
struct GeneratedContents {
    random: Random,
    left: u64,
}

impl Iterator for GeneratedContents {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let len = self.left.min(CHUNK_BYTES) as usize;
        self.left -= len as u64;
        let mut piece = vec![0; len];
        let (noise, text) = piece.split_at_mut(len / 4);
        self.random.fill(noise);
        let words = format!("{:016x} is what comes here\n", self.random.next_u64());
        for room in text.chunks_mut(words.len()) {
            room.copy_from_slice(&words.as_bytes()[..room.len()]);
        }
        (len > 0).then_some(piece)
    }
}

/// A file, described by the seed of its contents.
struct GeneratedFile {
    path: String,
    len: u64,
    seed: u64,
}

impl GeneratedFile {
    fn contents(&self) -> GeneratedContents {
        GeneratedContents { random: Random::new(self.seed), left: self.len }
    }
}

/// A layer that is compressed while it is written.
struct LayerBuilder<'a> {
    packer: Child,
    random: &'a mut Random,
    made: Vec<GeneratedFile>,
}

impl<'a> LayerBuilder<'a> {
    fn new(packer: &[&str], into: &Path, random: &'a mut Random) -> Self {
        let (program, more) = packer.split_first().unwrap();
        let mut packer = Command::new(program);
        packer.args(more).stdin(Stdio::piped()).stdout(File::create(into).unwrap());
        Self { packer: packer.spawn().unwrap(), random, made: vec![] }
    }

    fn write(&mut self, bytes: &[u8]) {
        self.packer.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    fn add_file(&mut self, path: String, len: u64) {
        let made = GeneratedFile { path, len, seed: self.random.next_u64() };
        self.write(&tar_entry_with_size(&made.path, b'0', "", len, b""));
        made.contents().for_each(|piece| self.write(&piece));
        self.write(&vec![0; (len.next_multiple_of(512) - len) as usize]);
        self.made.push(made);
    }

    /// Adds small files of `mib` in total, some with a second link.
    fn add_small_files(&mut self, dir: &str, mib: u64) {
        let mut left = mib * MIB;
        for nth in 0.. {
            let len = self.random.next_below(64 << 10).min(left);
            self.add_file(format!("{dir}/{}/file{nth}", nth / 300), len);
            if nth % 40 == 0 {
                let path = self.made.last().unwrap().path.clone();
                self.write(&tar_entry_with_size(&format!("{path}.link"), b'1', &path, 0, b""));
            }
            left -= len;
            if left == 0 {
                break;
            }
        }
    }

    fn finish(mut self) -> Vec<GeneratedFile> {
        self.write(&[0; 1024]);
        drop(self.packer.stdin.take());
        assert!(self.packer.wait().unwrap().success());
        self.made
    }
}

fn assert_volume_contains(draconis: &Draconis, image: &Path, made: &GeneratedFile) {
    let mut command = draconis.command();
    command.arg("cat").arg(format!("{}:/{}", image.display(), made.path));
    let mut cat = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut bytes = cat.stdout.take().unwrap();
    for piece in made.contents() {
        let mut found = vec![0; piece.len()];
        bytes.read_exact(&mut found).unwrap_or_else(|error| panic!("{}: {error}", made.path));
        assert!(found == piece, "{}", made.path);
    }
    assert_eq!(bytes.read(&mut [0]).unwrap(), 0, "{}", made.path);
    assert!(cat.wait().unwrap().success());
}

#[test]
#[ignore = "tools: zstd"]
fn memory_use_is_independent_of_image_size() {
    if !has_tool("an image of long layers", "zstd") {
        return;
    }
    let asked = std::env::var("DRACONIS_IMAGE_MIB").map(|mib| mib.parse().unwrap());
    let mib: u64 = asked.unwrap_or(512);
    let draconis = Draconis::new();
    let mut layout = OciLayout::new(draconis.path("oci"));
    let mut random = Random::new(5);
    let packed = draconis.path("packed");
    // zstd windows of 128 MiB: two at the same time would exceed the limit.
    let zstd = &["zstd", "-q", "-1", "--long=27"][..];
    let gzip = &["gzip", "-1"][..];
    let mut layers = vec![];
    let mut inside = vec![];
    let mut keep = |layer: LayerBuilder<'_>| {
        let made = layer.finish();
        layers.push(layout.add_file_as_blob("layer.v1.tar", &packed) + "}");
        inside.extend(made);
    };
    let mut layer = LayerBuilder::new(gzip, &packed, &mut random);
    layer.add_file("gone/large".into(), mib * MIB / 16);
    layer.add_small_files("usr", mib / 8);
    keep(layer);
    for nth in 0..2 {
        let mut layer = LayerBuilder::new(zstd, &packed, &mut random);
        layer.add_small_files(&format!("opt{nth}"), mib / 16);
        layer.add_file(format!("opt{nth}/large"), mib * MIB / 4);
        keep(layer);
    }
    let mut layer = LayerBuilder::new(gzip, &packed, &mut random);
    layer.write(&tar_entry_with_size(".wh.gone", b'0', "", 0, b""));
    layer.add_small_files("home", mib / 8);
    layer.add_file("home/large".into(), mib * MIB / 16);
    keep(layer);
    let manifest = layout.add_manifest_of_digests("linux/amd64", &layers);
    layout.add_to_index(&manifest, "long");

    let image = draconis.path("image");
    let script =
        format!("ulimit -d {MAX_MEMORY_KIB} && exec \"$0\" format -t ext4 --from \"$1\" \"$2\"");
    let mut format = Command::new("sh");
    format.args(["-c", &script, crate::common::program(), &layout.source_spec("long")]);
    run_and_capture(format.arg(&image));
    assert_fsck_clean(&image);
    draconis.run_failing(["cat", &format!("{}:/gone/large", image.display())]);
    for (nth, made) in inside.iter().enumerate() {
        if !made.path.starts_with("gone") && (nth % 500 == 0 || made.path.ends_with("large")) {
            assert_volume_contains(&draconis, &image, made);
        }
    }
}
