//! Ordinary tools work in `workspace-write` as they do without a sandbox: each row is a situation from public reports about executors that broke it.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::OsStr;

use dsh_policy::SandboxMode::WorkspaceWrite;
use dsh_tests::machine::{Feature, can_run};
use dsh_tests::{World, users};

/// What a command prints when it works. No row may leave a fact.
struct Row {
    name: &'static str,
    options: &'static [&'static str],
    command: &'static str,
    prints: &'static str,
}

const fn row(name: &'static str, command: &'static str, prints: &'static str) -> Row {
    Row {
        name,
        options: &[],
        command,
        prints,
    }
}

const fn offline(name: &'static str, command: &'static str, prints: &'static str) -> Row {
    Row {
        name,
        options: &["--network", "none"],
        command,
        prints,
    }
}

fn all_work(test: &str, feature: Feature, rows: &[Row]) {
    if !can_run(test, feature) {
        return;
    }
    for user in users() {
        for row in rows {
            let world = World::new(user);
            let options: Vec<&OsStr> = row.options.iter().map(OsStr::new).collect();
            let ran = world.run_with(WorkspaceWrite, &options, row.command);
            assert_eq!(ran.text(), row.prints.trim(), "{} {user:?} {ran:?}", row.name);
            assert_eq!(ran.result().exit_code, Some(0), "{} {user:?} {ran:?}", row.name);
            assert_eq!(ran.facts(), [], "{} {user:?}", row.name);
        }
    }
}

const PYTHON: &[Row] = &[
    offline(
        "socket pairs",
        r"python3 -c 'import socket;a,b=socket.socketpair();a.send(bytes([120]));print(b.recv(1))'",
        "b'x'",
    ),
    offline(
        "asyncio threads",
        "python3 -c 'import asyncio,time;print(asyncio.run(asyncio.to_thread(time.sleep,.1)))'",
        "None",
    ),
    row(
        "locks and pools, every start method",
        "cat > pools.py <<'X'\nimport multiprocessing as m\nif __name__ == '__main__':\n    m.Lock()\n    for k in ('fork', 'forkserver', 'spawn'):\n        with m.get_context(k).Pool(2) as p: print(k, p.map(abs, [-1, 2]))\nX\npython3 pools.py",
        "fork [1, 2]\nforkserver [1, 2]\nspawn [1, 2]",
    ),
    offline(
        "interface listing",
        "python3 -c 'import socket;print(len(socket.if_nameindex()) > 0)'",
        "True",
    ),
    Row {
        name: "own loopback server, three addresses",
        options: &["--network", "loopback"],
        command: "python3 - <<'X'\nimport socket\nfor f, a, c in ((2, '127.0.0.1', '127.0.0.1'), (10, '::1', '::1'), (10, '::', '::ffff:127.0.0.1')):\n    s = socket.socket(f)\n    if f == 10: s.setsockopt(41, 26, 0)\n    s.bind((a, 0)); s.listen()\n    socket.socket(f).connect((c, s.getsockname()[1])); print(c)\nX",
        prints: "127.0.0.1\n::1\n::ffff:127.0.0.1",
    },
    row(
        "write-ahead logs, shared memory maps",
        "python3 - <<'X'\nimport sqlite3, mmap\nc = sqlite3.connect('d.db'); print(c.execute('pragma journal_mode=wal').fetchone()); c.execute('create table t(x)'); c.commit()\nf = open('m', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); m[0:2] = b'ab'; m.flush(); print(open('m', 'rb').read(2))\nX",
        "('wal',)\nb'ab'",
    ),
    row(
        "RENAME_NOREPLACE, RENAME_EXCHANGE, O_TMPFILE",
        "python3 - <<'X'\nimport ctypes, os\nl = ctypes.CDLL(None, use_errno=True)\nopen('a', 'w'); open('b', 'w')\nprint(l.renameat2(-100, b'a', -100, b'b', 1), ctypes.get_errno(), l.renameat2(-100, b'a', -100, b'b', 2))\nfd = os.open('.', os.O_TMPFILE | os.O_WRONLY); print(l.linkat(-100, b'/proc/self/fd/%d' % fd, -100, b'c', 0x400))\nX",
        "-1 17 0\n0",
    ),
    row(
        "five threads that spawn",
        "python3 -c '\nimport subprocess, threading\ndef f():\n    for i in range(40): subprocess.run([\"true\"])\nt = [threading.Thread(target=f) for _ in range(5)]; [x.start() for x in t]; [x.join() for x in t]; print(1)'",
        "1",
    ),
];

const TOOLS: &[Row] = &[
    row(
        "a repository from nothing to gc",
        "git init -q repo; cd repo; echo 1 > f; git add f; git -c user.name=a -c user.email=b commit -q -m x; git checkout -q -b y; git gc -q; git log --oneline | wc -l; mkdir sub; cd sub; git rev-parse --show-prefix; ls -A",
        "1\nsub/",
    ),
    row(
        "a C compiler",
        "echo 'int main(){return 0;}' > a.c; cc a.c -o a && ./a && echo runs",
        "runs",
    ),
    row(
        "a job server",
        "printf 'all: a b\\na b:\\n\\t$(MAKE) -f sub.mk\\n' > Makefile; printf 'all:\\n\\t@echo sub\\n' > sub.mk; make -s -j2",
        "sub\nsub",
    ),
    row(
        "modes and times are kept",
        "echo a > s; sed -i s/a/b/ s; install -m755 s t; cp -p t u; touch -d @1577836800 u; tar cf x.tar s t u; mkdir o; tar xpf x.tar -C o; stat -c '%n %a %Y' o/u; cat o/s; test -w $(mktemp) && echo temporary",
        "o/u 755 1577836800\nb\ntemporary",
    ),
    row("a tracer", "strace -f -o /dev/null true && echo traced", "traced"),
    row(
        "an interactive shell, a terminal, a lock",
        "bash -ic 'echo in' 2>/dev/null; script -qec true /dev/null < /dev/null; flock lock echo locked",
        "in\nlocked",
    ),
    row(
        "process substitution, fifos, pipelines",
        "diff <(echo a) <(echo a) && echo same; mkfifo p; cat p & echo through > p; wait; for i in $(seq 100); do echo a | cat | cat > /dev/null; done; rm p; echo done",
        "same\nthrough\ndone",
    ),
    row(
        "questions about write access are answered truly",
        "test -w /etc; echo $?; test -w .; echo $?",
        "1\n0",
    ),
    row(
        "a signal to everybody reaches only the command's own",
        "sleep 60 & kill -TERM -1; wait; echo here",
        "here",
    ),
];

#[test]
fn python_works() {
    all_work("python_works", Feature::Python, PYTHON);
}

#[test]
fn the_tools_of_every_day_work() {
    all_work("the_tools_of_every_day_work", Feature::Tools, TOOLS);
}

#[test]
fn node_works() {
    let rows = [
        offline(
            "child processes",
            "node -e 'r=require(\"child_process\").spawnSync(\"true\");process.exit(r.error?1:0)'",
            "",
        ),
        offline(
            "a Unix server in TMPDIR",
            "node -e 'const net=require(\"net\"),p=process.env.TMPDIR+\"/x.sock\";const s=net.createServer(c=>c.end(\"hi\")).listen(p,()=>net.connect(p).on(\"data\",d=>{console.log(String(d));s.close()}))'",
            "hi",
        ),
        offline(
            "interface listing",
            "node -e 'require(\"os\").networkInterfaces();console.log(1)'",
            "1",
        ),
    ];
    all_work("node_works", Feature::Node, &rows);
}
