//! Scenarios with several calls or processes: each runs on both mounts, and the results are
//! compared.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::copy_program;
use crate::exact::calls::{CallGroup, SystemCallTest};
use crate::exact::case::{TARGET_STATES, TargetKind, TestCase};
use crate::exact::look::{ResultFields, format_bytes, format_result};
use crate::exact::sys::{self, AioContext};
use crate::exact::verdict::ComparisonVerdict;
use crate::exact::volumes::MountPair;
use crate::exact::who::TestUser;

type Scenario = fn(&Path) -> ResultFields;

const SCENARIOS: [(&str, Scenario); 6] = [
    ("asynchronous direct writes beside a reader", asynchronous_writes),
    ("handles of files that are not cached", file_handles),
    ("a layer above, with whiteouts", overlay_mount),
    ("a layer above, of a user's namespace", unprivileged_overlay_mount),
    ("a program that is written to while it runs", busy_executable),
    ("a saved document", editor_style_save),
];

/// Runs the scenarios whose names are chosen.
pub fn run_scenarios(
    pair: &MountPair,
    verdict: &mut ComparisonVerdict,
    is_chosen: impl Fn(&str) -> bool,
) {
    static CALLS: OnceLock<Vec<SystemCallTest>> = OnceLock::new();
    let calls = CALLS.get_or_init(|| {
        let call = |(name, _): &(&str, Scenario)| SystemCallTest {
            name: (*name).into(),
            group: CallGroup::Run,
            given: false,
            run: Box::new(|_| ()),
        };
        SCENARIOS.iter().map(call).collect()
    });
    for (i, ((name, scenario), call)) in SCENARIOS.iter().zip(calls).enumerate() {
        if !is_chosen(name) {
            continue;
        }
        let [ours, theirs] = [&pair.ours, &pair.theirs].map(|top| {
            let dir = top.join(format!("scenario{i}"));
            std::fs::create_dir_all(&dir).unwrap();
            scenario(&dir)
        });
        let case = TestCase {
            call,
            kind: TargetKind::Regular,
            who: TestUser::Root,
            state: &TARGET_STATES[0],
            watched: false,
            volume: "",
        };
        verdict.compare_results(&case, &ours, &theirs);
    }
}

/// Returns the directories of the scenarios, which may differ.
pub fn scenario_directories() -> impl Iterator<Item = String> {
    (0..SCENARIOS.len()).map(|i| format!("scenario{i}"))
}

/// Returns true if the environment selects a scenario.
pub fn is_selected(name: &str) -> bool {
    std::env::var("DRACONIS_EXACT").is_ok_and(|words| words == "all" || name.contains(&words))
        || std::env::var_os("DRACONIS_EXACT").is_none()
}

const PAGE_BYTES: usize = 4096;
const PAGE_COUNT: usize = 64;

/// Reads through a descriptor while another one has direct writes in flight; after each round every
/// reader must see the new bytes.
fn asynchronous_writes(dir: &Path) -> ResultFields {
    let path = dir.join("file");
    std::fs::write(&path, vec![0; PAGE_COUNT * PAGE_BYTES]).unwrap();
    let direct = sys::open(&path, libc::O_RDWR | libc::O_DIRECT, 0).unwrap();
    let held = sys::open(&path, libc::O_RDONLY, 0).unwrap();
    let mapped = sys::MemoryMapping::new(&held, PAGE_COUNT * PAGE_BYTES, false).unwrap();
    let (queue, stop) = (AioContext::new(PAGE_COUNT), AtomicBool::new(false));
    let mut stale = [0; 3];
    let mut answers = vec![];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let reader = sys::open(&path, libc::O_RDONLY, 0).unwrap();
            let mut page = vec![0; PAGE_BYTES];
            while !stop.load(Ordering::Relaxed) {
                for at in 0..PAGE_COUNT {
                    let _ = sys::pread(&reader, &mut page, (at * PAGE_BYTES) as i64);
                }
            }
        });
        // The reader must end even if this thread panics.
        let _end = SetOnDrop(&stop);
        let mut memory = vec![0_u8; 2 * PAGE_BYTES];
        let skip = memory.as_ptr().align_offset(PAGE_BYTES);
        // Random: most mounts show the difference within a few rounds.
        for round in 1..=200_u8 {
            if stale.iter().all(|&stale| stale > 0) {
                break;
            }
            memory[skip..skip + PAGE_BYTES].fill(round);
            let block = &memory[skip..skip + PAGE_BYTES];
            let blocks: Vec<_> =
                (0..PAGE_COUNT).map(|at| (block, (at * PAGE_BYTES) as i64)).collect();
            answers.push(queue.write(&direct, &blocks));
            let fresh = sys::open(&path, libc::O_RDONLY, 0).unwrap();
            let views =
                [read(&held), read(&fresh), mapped.read_bytes(PAGE_COUNT * PAGE_BYTES).unwrap()];
            for (stale, view) in stale.iter_mut().zip(views) {
                *stale += view.iter().filter(|&&byte| byte != round).count() / PAGE_BYTES;
            }
        }
    });
    answers.dedup();
    // The exact number is random.
    let told = |stale: usize| if stale == 0 { "none" } else { "some" }.to_string();
    vec![
        ("answers".into(), format!("{answers:?}")),
        ("stale pages, held open".into(), told(stale[0])),
        ("stale pages, opened anew".into(), told(stale[1])),
        ("stale pages, mapped".into(), told(stale[2])),
    ]
}

/// Sets a flag on drop.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn read(fd: &std::os::fd::OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_COUNT * PAGE_BYTES];
    let len = sys::pread(fd, &mut bytes, 0).unwrap();
    bytes.truncate(len as usize);
    bytes
}

/// File handles outlive cached inodes, and become stale when the files are deleted.
fn file_handles(dir: &Path) -> ResultFields {
    let mut handles = vec![];
    for name in ["file", "gone", "other", "dir", "dir/within"] {
        let path = dir.join(name);
        if name == "dir" {
            std::fs::create_dir(&path).unwrap();
        } else {
            std::fs::write(&path, name).unwrap();
        }
        handles.push((name, sys::name_to_handle(&path).unwrap()));
    }
    std::fs::remove_file(dir.join("gone")).unwrap();
    std::fs::rename(dir.join("other"), dir.join("dir/moved")).unwrap();
    let top = sys::open(dir, libc::O_RDONLY, 0).unwrap();
    let mut fields = vec![];
    for cached in [true, false] {
        if !cached {
            sys::sync_by_number(libc::SYS_syncfs, &top).unwrap();
            std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        }
        for (name, handle) in &handles {
            let opened = sys::open_by_handle(&top, handle, libc::O_RDONLY);
            let read = opened.and_then(|fd| {
                if *name == "dir" {
                    return sys::list_names(&fd).map(|names| names.join(" ").into_bytes());
                }
                let mut bytes = vec![0; 100];
                let len = sys::read(&fd, &mut bytes)?;
                bytes.truncate(len as usize);
                Ok(bytes)
            });
            let key = format!("{name}, {}", if cached { "cached" } else { "not cached" });
            fields.push((key, format_result(&read, |bytes| format_bytes(bytes))));
        }
    }
    fields
}

/// Runs a shell script; returns its output and errors.
fn run_script(dir: &Path, text: &str) -> ResultFields {
    let output = Command::new("sh").args(["-uc", text]).current_dir(dir).output().unwrap();
    let errors = [output.stdout, output.stderr].concat();
    let errors = String::from_utf8_lossy(&errors).replace(&*dir.to_string_lossy(), "DIR");
    let lines = errors.lines().enumerate();
    lines.map(|(i, line)| (format!("line {i:02}"), line.to_string())).collect()
}

const OVERLAY_SCRIPT: &str = "
    cd merged || exit
    cat kept; rm gone && ls; mkdir made && rmdir full 2>/dev/null; rm -r full && mkdir full && ls -A full
    mv kept moved && cat moved; echo changed >>linked && cat linked; chmod 600 linked; ln linked two
    mv tree tree2 2>/dev/null || { cp -a tree tree2 && rm -r tree; }; cat tree2/in/leaf
    setfattr -n user.a -v b moved && getfattr --only-values -n user.a moved; echo
    find . | LC_ALL=C sort; stat -c '%n %A %h %s' moved linked two
";

fn prepare_layers(dir: &Path) {
    for name in ["lower/full/x", "lower/tree/in", "upper", "work", "merged"] {
        std::fs::create_dir_all(dir.join(name)).unwrap();
    }
    for name in ["kept", "gone", "linked", "tree/in/leaf", "full/file"] {
        std::fs::write(dir.join("lower").join(name), format!("{name}\n")).unwrap();
    }
}

/// Overlayfs with upper and work directories on the mount.
fn overlay_mount(dir: &Path) -> ResultFields {
    prepare_layers(dir);
    run_script(
        dir,
        &format!(
            "mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged || exit
             ({OVERLAY_SCRIPT}); umount merged; ls -l upper | tail -n +2 | awk '{{print $1, $NF}}'"
        ),
    )
}

/// The same for a user, in a user namespace.
fn unprivileged_overlay_mount(dir: &Path) -> ResultFields {
    prepare_layers(dir);
    let _copies = crate::common::MOUNT_COPIES.write();
    let options = "lowerdir=lower,upperdir=upper,workdir=work,userxattr";
    run_script(
        dir,
        &format!(
            "chown -R 1001:2001 . ; cat >inner <<'END'
mount -t overlay overlay -o {options} merged || exit
({OVERLAY_SCRIPT})
END
             setpriv --reuid 1001 --regid 2001 --clear-groups unshare -Urm sh -u inner
             ls -l upper | tail -n +2 | awk '{{print $1, $NF}}'"
        ),
    )
}

/// A running program cannot be written, and a file open for writing cannot be executed.
fn busy_executable(dir: &Path) -> ResultFields {
    let path = dir.join("program");
    copy_program("/usr/bin/sleep", &path);
    let mut child = Command::new(&path).arg("100").spawn().unwrap();
    let told =
        |answer: Result<std::os::fd::OwnedFd, i32>| format_result(&answer, |_| "open".into());
    let mut fields = vec![
        ("open for writing".into(), told(sys::open(&path, libc::O_WRONLY, 0))),
        ("truncate".into(), format_result(&sys::truncate(&path, 10), i64::to_string)),
    ];
    child.kill().unwrap();
    child.wait().unwrap();
    let writer = sys::open(&path, libc::O_WRONLY, 0);
    fields.push(("open once it has ended".into(), format_result(&writer, |_| "open".into())));
    let ran = Command::new(&path).arg("0").status();
    fields.push(("run while open".into(), format!("{:?}", ran.map_err(|e| e.raw_os_error()))));
    fields
}

/// Saves as editors do: a copy, a lock, a rename over the old file, which is still open.
fn editor_style_save(dir: &Path) -> ResultFields {
    run_script(
        dir,
        "echo one >doc; exec 3<doc; cp -p doc doc~; echo two >.doc.new; sync -f .doc.new
         mv .doc.new doc; cat <&3; cat doc doc~; exec 4<>doc; rm doc; echo three >&4
         cat /proc/self/fd/4; ls -A; stat -L -c '%h %s' /proc/self/fd/4; exec 4>&-; ls -A",
    )
}
