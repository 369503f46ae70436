//! Images built by hand, from tars of `tar`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub(crate) fn run_and_capture(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Creates a tar of a directory, in pax format.
pub(crate) fn create_tar(dir: &Path, into: &Path, more: &[&str]) {
    let mut tar = Command::new("tar");
    tar.args(["--format=pax", "--xattrs", "--xattrs-include=*", "--xattrs-exclude=trusted.*"]);
    run_and_capture(tar.args(more).arg("-C").arg(dir).arg("-cf").arg(into).arg("."));
}

pub(crate) fn compress(program: &str, bytes: &[u8]) -> Vec<u8> {
    let mut child = Command::new(program)
        .arg("-c")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let feeder = std::thread::spawn(move || input.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    assert!(output.status.success());
    output.stdout
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bytes");
    std::fs::write(&path, bytes).unwrap();
    sha256_of_file(&path)
}

fn sha256_of_file(file: &Path) -> String {
    String::from_utf8(run_and_capture(Command::new("sha256sum").arg(file))).unwrap()[..64]
        .to_owned()
}

/// An OCI layout under construction.
pub(crate) struct OciLayout {
    pub dir: PathBuf,
    pub manifests: Vec<String>,
}

impl OciLayout {
    pub(crate) fn new(dir: PathBuf) -> Self {
        std::fs::create_dir_all(dir.join("blobs/sha256")).unwrap();
        std::fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).unwrap();
        Self { dir, manifests: vec![] }
    }

    /// Adds a blob; returns its descriptor without the closing brace.
    pub(crate) fn add_blob(&self, kind: &str, bytes: &[u8]) -> String {
        let path = self.dir.join("new blob");
        std::fs::write(&path, bytes).unwrap();
        self.add_file_as_blob(kind, &path)
    }

    /// Adds a file as a blob by moving it.
    pub(crate) fn add_file_as_blob(&self, kind: &str, file: &Path) -> String {
        let sum = sha256_of_file(file);
        let size = std::fs::metadata(file).unwrap().len();
        std::fs::rename(file, self.dir.join("blobs/sha256").join(&sum)).unwrap();
        let kind = format!("application/vnd.oci.image.{kind}");
        format!(r#"{{"mediaType":"{kind}","digest":"sha256:{sum}","size":{size}"#)
    }

    pub(crate) fn config_json(platform: &str) -> String {
        let (os, architecture) = platform.split_once('/').unwrap();
        format!(
            r#"{{"os":"{os}","architecture":"{architecture}","config":{{"Cmd":["/bin/{architecture}"]}}}}"#
        )
    }

    /// Adds a manifest; returns its descriptor without the closing brace.
    pub(crate) fn add_manifest(&self, platform: &str, layers: &[Vec<u8>]) -> String {
        let layers: Vec<String> =
            layers.iter().map(|layer| self.add_blob("layer.v1.tar", layer) + "}").collect();
        self.add_manifest_of_digests(platform, &layers)
    }

    /// Adds a manifest of layers given by descriptors.
    pub(crate) fn add_manifest_of_digests(&self, platform: &str, layers: &[String]) -> String {
        let config = self.add_blob("config.v1+json", Self::config_json(platform).as_bytes());
        let text =
            format!(r#"{{"schemaVersion":2,"config":{config}}},"layers":[{}]}}"#, layers.join(","));
        self.add_blob("manifest.v1+json", text.as_bytes())
    }

    /// Adds a descriptor to the index, with a tag.
    pub(crate) fn add_to_index(&mut self, descriptor: &str, tag: &str) {
        let named = format!(
            r#"{descriptor},"annotations":{{"org.opencontainers.image.ref.name":"{tag}"}}}}"#
        );
        self.manifests.push(named);
        let text = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, self.manifests.join(","));
        std::fs::write(self.dir.join("index.json"), text).unwrap();
    }

    /// Adds an image for one platform.
    pub(crate) fn add_image(&mut self, tag: &str, layers: &[Vec<u8>]) {
        let manifest = self.add_manifest("linux/amd64", layers);
        self.add_to_index(&manifest, tag);
    }

    pub(crate) fn source_spec(&self, tag: &str) -> String {
        let colon = if tag.is_empty() { "" } else { ":" };
        format!("oci:{}{colon}{tag}", self.dir.display())
    }
}

/// Writes the format of `docker save`; as in old versions, the last layer is a link.
pub(crate) fn write_docker_archive(dir: &Path, into: &Path, layers: &[Vec<u8>]) {
    std::fs::create_dir_all(dir).unwrap();
    let ids: Vec<String> =
        layers.iter().map(|layer| format!("\"sha256:{}\"", sha256(layer))).collect();
    let config = format!(
        r#"{{"os":"linux","architecture":"amd64","rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        ids.join(",")
    );
    let name = format!("{}.json", sha256(config.as_bytes()));
    std::fs::write(dir.join(&name), &config).unwrap();
    let mut names = vec![];
    for (nth, layer) in layers.iter().enumerate() {
        let own = dir.join(format!("layer{nth}"));
        std::fs::create_dir_all(&own).unwrap();
        if nth + 1 == layers.len() {
            std::fs::create_dir_all(dir.join("shared")).unwrap();
            std::fs::write(dir.join("shared/layer.tar"), layer).unwrap();
            std::os::unix::fs::symlink("../shared/layer.tar", own.join("layer.tar")).unwrap();
        } else {
            std::fs::write(own.join("layer.tar"), layer).unwrap();
        }
        names.push(format!("\"layer{nth}/layer.tar\""));
    }
    let manifest = format!(
        r#"[{{"Config":"{name}","RepoTags":["made/here:latest"],"Layers":[{}]}}]"#,
        names.join(",")
    );
    std::fs::write(dir.join("manifest.json"), manifest).unwrap();
    run_and_capture(Command::new("tar").arg("-C").arg(dir).arg("-cf").arg(into).arg("."));
}
