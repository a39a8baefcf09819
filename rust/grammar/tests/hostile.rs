//! Grammars that overflow, loop, panic or eat memory fail alone, and whatever else is compiled does not notice.

use std::fmt::Write as _;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process;
use std::thread;
use std::time::Duration;

use pie_grammar::{
    Compiler, CompilerCommand, Grammar, GrammarError, Limits, PendingGrammar, Settings, Vocabulary,
};

fn command() -> CompilerCommand {
    CompilerCommand {
        program: PathBuf::from(env!("CARGO_BIN_EXE_pie-grammar-compiler")),
        arguments: Vec::new(),
    }
}

fn limits() -> Limits {
    Limits {
        threads: NonZeroUsize::MIN,
        // Of a debug build on a busy machine.
        time: Duration::from_mins(10),
        compile_time: Duration::from_mins(2),
        slow: Duration::from_mins(1),
        ..Limits::default()
    }
}

fn compiler_with(limits: Limits, process: CompilerCommand) -> Compiler {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.push(Vec::new());
    let vocabulary = Vocabulary::new(&tokens, &[], &[256]).unwrap();
    let settings = Settings {
        limits,
        process: Some(process),
        ..Settings::default()
    };
    Compiler::with_settings(vocabulary, settings).unwrap()
}

fn compiler() -> Compiler {
    compiler_with(limits(), command())
}

fn failure(pending: &PendingGrammar) -> GrammarError {
    (*pending.wait().unwrap_err()).clone()
}

fn serves(compiler: &Compiler) {
    let schema =
        r#"{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}"#;
    let grammar = Grammar::JsonSchema(schema.into());
    compiler.compile(&grammar).wait().unwrap();
}

/// Objects in each other, each behind a reference.
fn nested_references(count: usize) -> Grammar {
    let mut text = String::from(r##"{"$ref": "#/$defs/d0", "$defs": {"##);
    for at in 0..count {
        let next = at + 1;
        let _ = write!(
            text,
            r##""d{at}": {{"type": "object", "properties": {{"p": {{"$ref": "#/$defs/d{next}"}}}}, "required": ["p"]}}, "##
        );
    }
    let _ = write!(text, r#""d{count}": {{"type": "null"}}}}}}"#);
    Grammar::JsonSchema(text.into())
}

/// References to references.
fn plain_references(count: usize) -> Grammar {
    let mut text = String::from(r##"{"$ref": "#/$defs/0", "$defs": {"##);
    for at in 0..count {
        let next = at + 1;
        let _ = write!(text, r##""{at}": {{"$ref": "#/$defs/{next}"}}, "##);
    }
    let _ = write!(text, r#""{count}": {{"type": "null"}}}}}}"#);
    Grammar::JsonSchema(text.into())
}

/// A chain of rules or of tokens of Lark, the last one first where it is reversed.
fn lark_chain(name: &str, count: usize, reversed: bool) -> Grammar {
    let mut lines: Vec<String> = (0..count)
        .map(|at| format!("{name}{at}: \"a\" {name}{}\n", at + 1))
        .collect();
    lines.push(format!("{name}{count}: \"b\"\n"));
    if reversed {
        lines.reverse();
    }
    Grammar::Lark(format!("start: {name}0\n{}", lines.concat()).into())
}

fn gbnf_chain(count: usize, reversed: bool) -> Grammar {
    let mut lines: Vec<String> = (0..count)
        .map(|at| format!("r{at} ::= r{}\n", at + 1))
        .collect();
    lines.push(format!("r{count} ::= \"b\"\n"));
    if reversed {
        lines.reverse();
    }
    Grammar::Ebnf(format!("root ::= r0\n{}", lines.concat()).into())
}

fn regex(text: &str) -> Grammar {
    Grammar::Regex(text.into())
}

fn schema(text: String) -> Grammar {
    Grammar::JsonSchema(text.into())
}

/// Whatever comes of it comes, and the next grammar is compiled.
fn is_survived(compiler: &Compiler, name: &str, grammar: &Grammar) -> Result<(), GrammarError> {
    let limit = Limits::default().bytes;
    assert!(grammar.bytes() <= limit, "{name}: {}", grammar.bytes());
    let result = compiler.compile(grammar).wait();
    serves(compiler);
    let result = result.map(drop).map_err(|error| (*error).clone());
    if let Err(error) = &result {
        let text = error.to_string();
        assert!(!text.contains('\n') && text.len() < 600, "{name}: {text}");
        assert!(text.starts_with("the "), "{name}: {text}");
    }
    eprintln!("{name}: {result:?}");
    result
}

#[test]
fn deep_chains_fail_alone() {
    let compiler = compiler();
    let fails = |name: &str, grammar: &Grammar| is_survived(&compiler, name, grammar).unwrap_err();
    for (name, grammar) in [
        ("5,000 nested references", nested_references(5000)),
        ("20,000 references", plain_references(20_000)),
        ("30,000 Lark tokens", lark_chain("T", 30_000, false)),
        (
            "30,000 Lark tokens, reversed",
            lark_chain("T", 30_000, true),
        ),
        ("30,000 Lark rules", lark_chain("r", 30_000, false)),
    ] {
        let error = fails(name, &grammar);
        assert!(matches!(error, GrammarError::TooDeep { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("16384 KiB of stack"), "{text}");
    }
    for reversed in [false, true] {
        let error = fails("40,000 GBNF rules", &gbnf_chain(40_000, reversed)).to_string();
        assert!(error.contains("200 is the most"), "{error}");
    }
    let nested = |open: &str, close: &str, depth| {
        schema(format!("{}true{}", open.repeat(depth), close.repeat(depth)))
    };
    for (name, grammar) in [
        ("arrays", nested("[", "]", 100_000)),
        ("items", nested(r#"{"items":"#, "}", 90_000)),
        ("not", nested(r#"{"not":"#, "}", 100_000)),
        ("tags", {
            let inner = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
            Grammar::StructuralTag(
                format!(r#"{{"triggers": ["<"], "structures": [{{"begin": "<a>", "schema": {inner}, "end": ""}}]}}"#)
                    .into(),
            )
        }),
    ] {
        let error = fails(name, &grammar).to_string();
        assert!(error.contains("nested deeper than 128"), "{error}");
    }
    let groups = "(".repeat(100_000) + "a" + &")".repeat(100_000);
    fails("nested groups of a regex", &regex(&groups));
    fails(
        "nested groups of Lark",
        &Grammar::Lark(
            format!("start: {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000)).into(),
        ),
    );
    fails(
        "nested groups of GBNF",
        &Grammar::Ebnf(format!("root ::= {groups}").into()),
    );
}

/// The longest chain of a kind that compiles.
fn longest(compiler: &Compiler, chain: &dyn Fn(usize) -> Grammar) -> usize {
    let (mut good, mut bad) = (1, 16_000);
    while bad - good > 1 + good / 16 {
        let middle = usize::midpoint(good, bad);
        if compiler.compile(&chain(middle)).wait().is_ok() {
            good = middle;
        } else {
            bad = middle;
        }
    }
    good
}

/// Compiling takes the most stack by far: what survives it in a process is compiled in this one, and followed and dropped by threads
/// with less.
#[test]
fn what_just_compiles_is_followed_with_little_stack() {
    let limits = Limits {
        stack: 2 << 20,
        ..limits()
    };
    let compiler = compiler_with(limits, command());
    let chains: [(&str, &dyn Fn(usize) -> Grammar); 5] = [
        ("nested references", &nested_references),
        ("references", &plain_references),
        ("Lark tokens", &|count| lark_chain("T", count, true)),
        ("Lark rules", &|count| lark_chain("r", count, false)),
        ("GBNF rules", &|count| gbnf_chain(count, true)),
    ];
    for (name, chain) in chains {
        let count = longest(&compiler, chain);
        eprintln!("{name}: {count}");
        let pending = compiler.compile(&chain(count));
        drop(compiler.compile(&chain(count + 1)));
        let follow = move || {
            let mut matcher = pending.wait().unwrap();
            let mut mask = vec![0; matcher.vocabulary().mask_words()];
            let mut forced = Vec::new();
            matcher
                .jump_forward_tokens(1000, &mut mask, &mut forced)
                .unwrap();
            let copy = matcher.clone();
            drop((matcher, copy, pending));
        };
        let thread = thread::Builder::new().stack_size(512 << 10);
        thread.spawn(follow).unwrap().join().unwrap();
    }
}

/// A schema whose patterns have an intersection that takes very long to find.
fn time_bomb(count: usize) -> Grammar {
    let pattern = |at| format!(r#"{{"type":"string","pattern":"[ab]{{{at},}}c.*d{{{at}}}"}}"#);
    let patterns: Vec<String> = (0..count).map(pattern).collect();
    schema(format!("{{\"allOf\":[{}]}}", patterns.join(",")))
}

#[test]
fn bombs_of_time_and_memory_fail_alone() {
    let limits = Limits {
        compile_time: Duration::from_secs(5),
        ..limits()
    };
    let compiler = compiler_with(limits, command());
    let many = |count: usize, item: &dyn Fn(usize) -> String| -> String {
        (0..count).map(item).collect::<Vec<_>>().join(",")
    };
    let unions = "{\"oneOf\":[".to_owned()
        + &many(12, &|at| {
            format!(r#"{{"properties":{{"p{at}":{{"type":"string"}}}}}}"#)
        })
        + "]}";
    for (name, grammar) in [
        ("repetitions", regex("((a{1,1000}){1,1000}){1,1000}")),
        ("a large class", regex("(\\w{1,1000}\\s){1,1000}")),
        ("an automaton", regex("(a|b)*a(a|b){500}c")),
        ("a large enum", schema(format!("{{\"enum\":[{}]}}", many(60_000, &|at| format!("\"x{at}y\""))))),
        ("unions of unions", schema(format!("{{\"allOf\":[{}]}}", many(12, &|_| unions.clone())))),
        ("many items", schema(r#"{"type":"array","items":{"type":"string","maxLength":100000},"minItems":100000,"maxItems":200000}"#.into())),
        ("a long string", schema(format!(r#"{{"const":"{}"}}"#, "a".repeat(1_000_000)))),
        ("a large multiple", schema(r#"{"type":"number","multipleOf":0.0000000123457}"#.into())),
        ("patterns", time_bomb(40)),
        ("brackets of a tag", Grammar::StructuralTag(
            format!(r#"{{"triggers": ["<"], "structures": [{{"begin": "{}{}", "schema": {{}}, "end": ""}}]}}"#, "<".repeat(200_000), ">".repeat(200_000)).into(),
        )),
    ] {
        // Some are compiled after all.
        let _ = is_survived(&compiler, name, &grammar);
    }
}

/// A stand-in for a compiler process, as a script of a shell.
fn script(text: &str) -> CompilerCommand {
    CompilerCommand {
        program: "/bin/sh".into(),
        arguments: [
            "-c".into(),
            text.into(),
            env!("CARGO_BIN_EXE_pie-grammar-compiler").into(),
        ]
        .to_vec(),
    }
}

#[test]
fn little_memory_is_a_failure_that_names_it() {
    let limits = Limits {
        memory: 1 << 20,
        ..limits()
    };
    let compiler = compiler_with(limits, command());
    let values: Vec<String> = (0..60_000).map(|at| format!("\"x{at}y\"")).collect();
    let grammar = schema(format!("{{\"enum\":[{}]}}", values.join(",")));
    let error = failure(&compiler.compile(&grammar));
    assert_eq!(
        error.to_string(),
        "the JSON schema takes more than 1 MiB of memory to compile: simplify it"
    );
}

/// The process of this test that was started last by this test's thread is not known by its number, so that the shell tells it.
#[test]
fn a_process_that_is_killed_is_started_again() {
    let folder = std::env::temp_dir().join(format!("pie-grammar-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    let note = folder.join("pid");
    let compiler = compiler_with(
        limits(),
        script(&format!("echo $$ > {}; exec \"$0\"", note.display())),
    );
    serves(&compiler);
    for number in 0..3 {
        let pid = fs::read_to_string(&note).unwrap();
        let killed = process::Command::new("kill")
            .args(["-9", pid.trim()])
            .status();
        assert!(killed.unwrap().success());
        compiler
            .compile(&regex(&format!("a{number}")))
            .wait()
            .unwrap();
    }
    fs::remove_dir_all(&folder).unwrap();
}

/// The process whose number is in a file, once it is at work.
fn busy_process(note: &Path) -> String {
    let mut seen = None;
    loop {
        let pid = fs::read_to_string(note).unwrap().trim().to_owned();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // After its name: the state first, and its time as the twelfth.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        if let ["R" | "S", .., ticks] = fields[..fields.len().min(12)] {
            let ticks: u64 = ticks.parse().unwrap();
            let (first, since) = seen.get_or_insert_with(|| (pid.clone(), ticks));
            if *first != pid {
                seen = None;
            } else if ticks > *since + 5 {
                return pid;
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// As a panic does that aborts, and as the kernel does when memory is short.
#[test]
fn a_process_that_dies_while_it_compiles_fails_its_grammar_alone() {
    let folder = std::env::temp_dir().join(format!("pie-grammar-dying-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    let note = folder.join("pid");
    let command = script(&format!("echo $$ > {}; exec \"$0\"", note.display()));
    let compiler = compiler_with(limits(), command);
    for (signal, patterns) in [("-ABRT", 60), ("-KILL", 61)] {
        serves(&compiler);
        compiler.compile(&regex(signal)).wait().unwrap();
        let doomed = compiler.compile(&time_bomb(patterns));
        let neighbour = compiler.compile(&regex(&format!("a{signal}")));
        // The first one has compiled others, so that a fresh one tries again.
        for _ in 0..2 {
            let pid = busy_process(&note);
            let killed = process::Command::new("kill").args([signal, &pid]).status();
            assert!(killed.unwrap().success());
        }
        let error = failure(&doomed).to_string();
        assert!(
            error.contains("ended its compiler process (signal: "),
            "{error}"
        );
        neighbour.wait().unwrap();
    }
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_process_that_never_answers_is_killed_and_does_not_hold_up_others() {
    // Answers that it is ready, and then reads for ever.
    let mute = "printf '\\007\\000\\000\\000\"Ready\"' >&0; exec cat > /dev/null";
    let limits = Limits {
        slow: Duration::from_millis(10),
        compile_time: Duration::from_millis(30),
        ..limits()
    };
    let compiler = compiler_with(limits, script(mute));
    let error = failure(&compiler.compile(&regex("a")));
    assert!(matches!(error, GrammarError::TooSlow { .. }), "{error}");
    // What was refused is refused at once.
    let again = compiler.compile(&regex("a")).progress();
    assert!(
        matches!(again, pie_grammar::Progress::Failed(_)),
        "{again:?}"
    );
}

#[test]
fn what_ends_its_process_is_named() {
    let dies = "printf '\\007\\000\\000\\000\"Ready\"' >&0; head -c 200 > /dev/null; kill -KILL $$";
    let compiler = compiler_with(limits(), script(dies));
    let error = failure(&compiler.compile(&regex(&"a".repeat(300)))).to_string();
    assert!(
        error.contains("ended its compiler process (signal: 9"),
        "{error}"
    );
    let compiler = compiler_with(limits(), script("echo no module >&2; exit 1"));
    let error = failure(&compiler.compile(&regex("a"))).to_string();
    assert!(
        error.contains("no compiler for the regular expression can be started (no module)"),
        "{error}"
    );
    let nothing = CompilerCommand {
        program: "/does/not/exist".into(),
        arguments: Vec::new(),
    };
    let error = failure(&compiler_with(limits(), nothing).compile(&regex("a"))).to_string();
    assert!(error.contains("No such file"), "{error}");
}

/// Not a test by itself: the next one kills it.
#[test]
#[ignore = "it waits to be killed"]
fn a_server_that_is_killed() {
    let note = std::env::var("PIE_GRAMMAR_NOTE").unwrap();
    let compiler = compiler_with(
        limits(),
        script(&format!("echo $$ > {note}.pid; exec \"$0\"")),
    );
    serves(&compiler);
    let pending = compiler.compile(&time_bomb(60));
    fs::rename(format!("{note}.pid"), &note).unwrap();
    let _ = pending.wait();
}

#[test]
fn no_compiler_process_outlives_its_server() {
    let folder = std::env::temp_dir().join(format!("pie-grammar-server-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    let note = folder.join("note");
    let mut server = process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_server_that_is_killed", "--ignored"])
        .env("PIE_GRAMMAR_NOTE", &note)
        .stdout(process::Stdio::null())
        .stderr(process::Stdio::null())
        .spawn()
        .unwrap();
    while !note.exists() {
        assert!(server.try_wait().unwrap().is_none(), "it ended");
        thread::sleep(Duration::from_millis(10));
    }
    let pid = fs::read_to_string(&note).unwrap();
    let lives = || {
        let status = fs::read_to_string(format!("/proc/{}/status", pid.trim()));
        status.is_ok_and(|status| !status.contains("State:\tZ"))
    };
    assert!(lives());
    server.kill().unwrap();
    server.wait().unwrap();
    while lives() {
        thread::sleep(Duration::from_millis(10));
    }
    fs::remove_dir_all(&folder).unwrap();
}
