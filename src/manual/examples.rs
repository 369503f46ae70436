//! Examples of the manual pages. `tests/manual.rs` runs them page by page, in order, in a
//! directory with the files that they name.

/// Examples of each page: description and commands.
pub const COMMAND_EXAMPLES: &[(&str, &[(&str, &str)])] = &[
    (
        "draconis",
        &[
            (
                "Make a volume of a directory, and look into it",
                "draconis format --from tree new.img\ndraconis ls -l new.img",
            ),
            (
                "Mount it, use it, and unmount it",
                "draconis mount new.img mnt\ncp notes.txt mnt/\ndraconis umount mnt",
            ),
            (
                "Change it without mounting it",
                "draconis put notes.txt new.img:/copy.txt\ndraconis check new.img",
            ),
        ],
    ),
    (
        "draconis-mount",
        &[
            (
                "Mount a volume to read and write it",
                "draconis mount disk.img mnt\ndraconis umount mnt",
            ),
            (
                "Only read it, and keep 64 MiB of it in memory",
                "draconis mount -o ro,data_cache=64M disk.img mnt\ndraconis umount mnt",
            ),
            (
                "Mount the first partition of an image",
                "draconis mount -o partition=1 parted.img mnt\ndraconis umount mnt",
            ),
            (
                "Make an empty volume, and mount it",
                "draconis mount --create 64M new.img mnt\ndraconis umount mnt",
            ),
        ],
    ),
    (
        "draconis-umount",
        &[("Unmount a directory", "draconis mount disk.img mnt\ndraconis umount mnt")],
    ),
    (
        "draconis-status",
        &[
            ("Show what is mounted", "draconis status"),
            ("Only what is mounted at or below a directory", "draconis status mnt"),
            ("As JSON, for other programs", "draconis status --json"),
        ],
    ),
    (
        "draconis-serve",
        &[(
            "Run the manager in the foreground until nothing is mounted",
            "draconis serve --until-idle",
        )],
    ),
    (
        "draconis-upgrade",
        &[(
            "Go on with a new program, after it was installed",
            "draconis mount disk.img mnt\ndraconis upgrade\ndraconis umount mnt",
        )],
    ),
    (
        "draconis-export",
        &[
            (
                "Export an image at a Unix socket while a command runs, such as qemu-img or nbdcopy",
                "draconis export --nbd unix:disk.sock --run 'echo \"$uri\"' disk.img",
            ),
            (
                "Export it read-only at a free TCP port of this machine",
                "draconis export -r --nbd tcp:127.0.0.1:0 --run 'echo \"$uri\"' disk.img",
            ),
            (
                "Serve it to QEMU by vhost-user while a command runs, such as the machine",
                "draconis export --vhost-user vm.sock --run 'test -S \"$unixsocket\"' disk.img",
            ),
        ],
    ),
    (
        "draconis-info",
        &[
            ("Show what an image holds", "draconis info disk.img"),
            ("The same of a partition, as JSON", "draconis info --partition 1 --json parted.img"),
        ],
    ),
    (
        "draconis-check",
        &[
            ("Check a volume", "draconis check disk.img"),
            ("Write every complaint as JSON", "draconis check --json disk.img > report.json"),
        ],
    ),
    (
        "draconis-repair",
        &[
            ("Show what a repair would do", "draconis repair -n disk.img"),
            (
                "Repair without a question, and keep what is needed to take the repair back",
                "draconis repair -y --undo disk.undo disk.img",
            ),
        ],
    ),
    (
        "draconis-rescue",
        &[
            ("Copy out what can be read of a damaged volume", "draconis rescue disk.img rescued"),
            (
                "The same of a volume in a partition, with a summary in JSON",
                "draconis rescue --partition 1 --json parted.img from-partition",
            ),
        ],
    ),
    (
        "draconis-undelete",
        &[
            ("List deleted files", "draconis undelete disk.img"),
            (
                "Copy a file out that was deleted a moment ago",
                "draconis mount --create 64M new.img mnt\necho lost > mnt/letter\nsync -f mnt\nrm mnt/letter\n\
                 draconis umount mnt\ndraconis undelete new.img letter restored.txt",
            ),
            ("Browse the deleted files as a tree", "draconis ls -R disk.img@deleted"),
        ],
    ),
    (
        "draconis-ls",
        &[
            ("List the root directory", "draconis ls -l disk.img"),
            (
                "List two directories and all below them",
                "draconis ls -R disk.img:/etc disk.img:/home",
            ),
            ("The attributes of a directory itself", "draconis ls -ld disk.img:/home"),
            ("Everything as JSON", "draconis ls -aR --json disk.img > list.json"),
        ],
    ),
    ("draconis-cat", &[("Write a file to the terminal", "draconis cat disk.img:/etc/hosts")]),
    (
        "draconis-stat",
        &[
            ("Show all about a file", "draconis stat disk.img:/etc/hosts"),
            ("As JSON, of what a link leads to", "draconis stat -L --json disk.img:/etc/link"),
        ],
    ),
    (
        "draconis-tree",
        &[
            ("Show all directories and files", "draconis tree disk.img"),
            ("Two levels of one directory", "draconis tree -L 2 disk.img:/home"),
        ],
    ),
    (
        "draconis-get",
        &[
            ("Copy a file out of a volume", "draconis get disk.img:/etc/hosts ."),
            ("Copy a tree, under a new name", "draconis get -r disk.img:/home backup"),
            ("Look at a file through a filter", "draconis get disk.img:/etc/hosts - | sort"),
        ],
    ),
    (
        "draconis-tar",
        &[
            ("Archive a volume", "draconis tar disk.img > disk.tar"),
            ("Archive a directory, compressed", "draconis tar disk.img:/home | gzip > home.tar.gz"),
            (
                "For a reader that knows no sparse files",
                "draconis tar --sparse=never disk.img > plain.tar",
            ),
        ],
    ),
    (
        "draconis-format",
        &[
            ("Make an empty volume of 1 GiB", "draconis format new.img 1G"),
            (
                "Make one of ext4, without a journal",
                "draconis format -t ext4 -O ^has_journal new.img 1G",
            ),
            (
                "Make the smallest one of ext4 that holds a directory",
                "draconis format -t ext4 --min --from tree small.img",
            ),
            (
                "Make a volume of a directory, with 16 MiB to spare",
                "draconis format --from tree --free 16M tree.img",
            ),
            (
                "Make one of an archive, the same whenever it is made",
                "SOURCE_DATE_EPOCH=1700000000 draconis format --seed 1 --from tree.tar.gz same.img",
            ),
            (
                "Make one of a container image, with room to write in",
                "draconis tar --oci image.tar disk.img\n\
                 draconis format -t ext4 --free 25% --from oci-archive:image.tar root.img",
            ),
            (
                "Make one of several archives, without what was built",
                "draconis format --from tree.tar.gz --from tree.tar.gz --exclude '*.o' all.img",
            ),
            (
                "Name it, and give its root directory to a user",
                "draconis format -L data -E root_owner=1000:1000 data.img 64M",
            ),
        ],
    ),
    (
        "draconis-put",
        &[
            ("Put a file into a directory", "draconis put notes.txt disk.img:/home/"),
            (
                "Put a tree, all of it as one user's",
                "draconis put -r --owner 1000:1000 tree disk.img:/",
            ),
            ("Put what a program writes", "date | draconis put - disk.img:/etc/built"),
        ],
    ),
    (
        "draconis-untar",
        &[
            ("Unpack an archive", "draconis untar -f tree.tar.gz disk.img:/home"),
            ("Unpack what a program writes", "tar -c tree | draconis untar disk.img"),
        ],
    ),
    (
        "draconis-cp",
        &[
            (
                "Copy a file inside a volume",
                "draconis cp disk.img:/etc/hosts disk.img:/etc/hosts.old",
            ),
            (
                "Copy a tree into another volume, as it is",
                "draconis cp -a disk.img:/home other.img:/",
            ),
        ],
    ),
    (
        "draconis-mkdir",
        &[
            (
                "Make a directory and what is missing above it",
                "draconis mkdir -p disk.img:/srv/www/pages",
            ),
            (
                "With a mode and an owner",
                "draconis mkdir -m 700 --owner 1000:1000 disk.img:/private",
            ),
        ],
    ),
    (
        "draconis-rm",
        &[
            ("Remove a file", "draconis rm disk.img:/etc/hosts"),
            ("Remove a tree", "draconis rm -r disk.img:/home"),
        ],
    ),
    (
        "draconis-mv",
        &[
            ("Rename a file", "draconis mv disk.img:/etc/hosts disk.img:/etc/hosts.old"),
            ("Exchange two directories", "draconis mv --exchange disk.img:/etc disk.img:/home"),
        ],
    ),
    (
        "draconis-ln",
        &[
            ("Give a file another name", "draconis ln disk.img:/etc/hosts disk.img:/hosts"),
            ("Make a symbolic link, or replace it", "draconis ln -sf etc/hosts disk.img:/link"),
        ],
    ),
    (
        "draconis-chmod",
        &[
            ("Set a mode", "draconis chmod 600 disk.img:/etc/hosts"),
            ("Let everybody read a tree", "draconis chmod -R a+rX disk.img:/home"),
        ],
    ),
    (
        "draconis-chown",
        &[
            ("Give a tree to a user", "draconis chown -R 1000:1000 disk.img:/home"),
            ("Change the group of a symbolic link", "draconis chown -h :5 disk.img:/etc/link"),
        ],
    ),
    (
        "draconis-touch",
        &[
            ("Make an empty file, or set its times to now", "draconis touch disk.img:/etc/empty"),
            (
                "Set the time of modification",
                "draconis touch -m -d '2026-11-20 23:36' disk.img:/etc/hosts",
            ),
        ],
    ),
    (
        "draconis-truncate",
        &[
            ("Make a file of one hole", "draconis truncate -s 1G disk.img:/hole"),
            ("Take the last ten bytes away", "draconis truncate -s -10 disk.img:/etc/hosts"),
        ],
    ),
    (
        "draconis-set-label",
        &[(
            "Give a volume a label, and take it away",
            "draconis set-label disk.img data\ndraconis set-label disk.img",
        )],
    ),
    (
        "draconis-grow",
        &[("Make a volume larger, with the file that it is in", "draconis grow disk.img 32M")],
    ),
    (
        "draconis-shrink",
        &[
            ("Make a volume smaller, with the file that it is in", "draconis shrink disk.img 12M"),
            ("As small as what it holds", "draconis shrink --min disk.img"),
        ],
    ),
    (
        "draconis-tune",
        &[
            (
                "Give a volume a label and another identity",
                "draconis tune -L data -U random disk.img",
            ),
            ("Reserve nothing, and add a journal", "draconis tune -m 0 -j disk.img"),
            ("List what the superblock says", "draconis tune -l disk.img"),
        ],
    ),
    (
        "draconis-store",
        &[(
            "Make a store, put a file into it, and get it back",
            "draconis store create new.store --size 64M\ndraconis store put new.store new notes.txt\ndraconis store ls new.store",
        )],
    ),
    (
        "draconis-store-probe",
        &[("Measure the disk that a directory is on", "draconis store probe --size 16M .")],
    ),
    (
        "draconis-store-create",
        &[
            (
                "Make a store of 64 MiB, laid out as the disk below wants it",
                "draconis store create new.store --size 64M",
            ),
            (
                "Lay it out for flash, and leave it a hole",
                "draconis store create sparse.store --size 1G --layout cow --sparse",
            ),
        ],
    ),
    (
        "draconis-store-info",
        &[("Show a store's layout and what is used", "draconis store info things.store")],
    ),
    ("draconis-store-check", &[("Check a store", "draconis store check things.store")]),
    (
        "draconis-store-disk",
        &[
            (
                "Make a disk of 16 MiB, and a volume on it",
                "draconis store disk things.store vol 16M\ndraconis format -t ext2 things.store#vol\ndraconis put notes.txt things.store#vol:/",
            ),
            (
                "The same in a bucket that is a directory",
                "draconis store create file://$PWD/bucket --size 64M\ndraconis store disk file://$PWD/bucket vol 16M\ndraconis format -t ext2 file://$PWD/bucket#vol\ndraconis put notes.txt file://$PWD/bucket#vol:/",
            ),
            (
                "In a bucket, with what is waited for in a file here, which is sent behind",
                "draconis store create file://$PWD/far --size 64M\ndraconis store disk --journal $PWD/far.journal,16M file://$PWD/far vol 16M\ndraconis format -t ext2 --journal $PWD/far.journal file://$PWD/far#vol",
            ),
        ],
    ),
    (
        "draconis-store-snapshot",
        &[(
            "Keep a disk as it is, and look into what was kept",
            "draconis store disk things.store kept 16M\ndraconis format -t ext2 things.store#kept\ndraconis store snapshot things.store#kept monday\ndraconis ls things.store#kept@monday",
        )],
    ),
    (
        "draconis-store-clone",
        &[(
            "Make a second disk of what one has",
            "draconis store disk things.store one 16M\ndraconis store clone things.store#one two",
        )],
    ),
    (
        "draconis-store-rollback",
        &[(
            "Make a disk what it was",
            "draconis store disk things.store back 16M\ndraconis store snapshot things.store#back before\ndraconis store rollback things.store#back before",
        )],
    ),
    ("draconis-store-ls", &[("List objects, as JSON", "draconis store ls --json things.store")]),
    (
        "draconis-store-put",
        &[
            (
                "Put a file as a new object; its number is printed",
                "draconis store put things.store new notes.txt",
            ),
            ("Replace an object", "date | draconis store put things.store 1 -"),
        ],
    ),
    (
        "draconis-store-get",
        &[("Write an object to a file", "draconis store get things.store 1 copy.txt")],
    ),
    (
        "draconis-store-append",
        &[("Append to an object", "draconis store append things.store 1 notes.txt")],
    ),
    ("draconis-store-rm", &[("Remove an object", "draconis store rm things.store 1")]),
    (
        "draconis-store-grow",
        &[("Give a store a length of 128 MiB", "draconis store grow things.store 128M")],
    ),
    (
        "draconis-store-shrink",
        &[("Cut a store to 32 MiB", "draconis store shrink things.store 32M")],
    ),
    (
        "draconis-store-salvage",
        &[(
            "Bring what can be read of a store into a new one",
            "draconis store salvage things.store saved.store",
        )],
    ),
    (
        "draconis-kv",
        &[(
            "Give a key a value, and read it",
            "draconis kv put things.store colour green\ndraconis kv get things.store colour",
        )],
    ),
    (
        "draconis-kv-put",
        &[
            ("Give a key a value", "draconis kv put things.store colour green"),
            ("Give it the contents of a file", "draconis kv put things.store notes < notes.txt"),
        ],
    ),
    ("draconis-kv-get", &[("Write a value", "draconis kv get things.store key")]),
    ("draconis-kv-del", &[("Take keys away", "draconis kv del things.store key another")]),
    (
        "draconis-kv-scan",
        &[
            ("All keys that begin alike", "draconis kv scan -k --prefix ke things.store"),
            ("The last ten", "draconis kv scan -r -n 10 things.store"),
            (
                "Write all keys and values to a file, and read them back",
                "draconis kv scan things.store > pairs.txt\ndraconis kv load things.store pairs.txt",
            ),
        ],
    ),
    ("draconis-kv-stats", &[("Count keys and bytes", "draconis kv stats things.store")]),
    (
        "draconis-kv-load",
        &[(
            "Put what lines say: key, tab, value",
            "printf 'a\\t1\\nb\\t2\\n' | draconis kv load things.store -",
        )],
    ),
    ("draconis-lab", &[("Show what can be measured", "draconis lab list")]),
    (
        "draconis-completions",
        &[("Complete commands and paths in this bash", "eval \"$(draconis completions bash)\"")],
    ),
    (
        "draconis-manpages",
        &[("Write the pages into a directory", "mkdir -p man1\ndraconis manpages man1")],
    ),
];
