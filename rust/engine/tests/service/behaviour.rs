//! What the stand-in for the driver is told to do wrong.

/// What a test has the driver do besides serving. Events happen once in the life of a test, unless they say otherwise.
#[derive(Clone, Copy, Default)]
pub(crate) struct Behaviour {
    /// Ends before the handshake, from this start on, counted from 1.
    pub(crate) die_early_from: Option<u32>,
    /// Ends at this frame of its first start, or of every one.
    pub(crate) die_at: Option<u32>,
    pub(crate) die_always: bool,
    /// Answers this frame of its first start never.
    pub(crate) stuck_at: Option<u32>,
    /// Answers this frame of its first start with a status.
    pub(crate) refuse_at: Option<u32>,
    /// Gives no token to requests whose text begins with this one.
    pub(crate) empty: Option<u32>,
    /// Ends at every frame that has a request whose text begins with this one, as often as that may be.
    pub(crate) die_of: Option<u32>,
    /// Answers such a frame with a status.
    pub(crate) refuse: Option<u32>,
    /// Milliseconds of each frame.
    pub(crate) slow: u64,
    pub(crate) shrink: Shrink,
    /// Is not ready, from its second start on, before a file `ready` lies where its starts are counted.
    pub(crate) waits: bool,
    /// Bytes of a slot's request.
    pub(crate) slot_bytes: Option<u32>,
}

/// Whether it has less pages from its second start on.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) enum Shrink {
    #[default]
    Never,
    Always,
    /// Unless it is told how many there were.
    Untold,
}

impl Behaviour {
    pub(crate) fn parse(text: &str) -> Self {
        let mut behaviour = Self::default();
        for word in text.split_whitespace() {
            let (name, value) = word.split_once('=').unwrap_or((word, "0"));
            let value: u32 = value.parse().unwrap();
            match name {
                "die-early-from" => behaviour.die_early_from = Some(value),
                "die-at" => behaviour.die_at = Some(value),
                "die-always" => behaviour.die_always = true,
                "stuck-at" => behaviour.stuck_at = Some(value),
                "refuse-at" => behaviour.refuse_at = Some(value),
                "empty" => behaviour.empty = Some(value),
                "die-of" => behaviour.die_of = Some(value),
                "refuse" => behaviour.refuse = Some(value),
                "slow" => behaviour.slow = value.into(),
                "shrink" => behaviour.shrink = Shrink::Always,
                "short" => behaviour.shrink = Shrink::Untold,
                "waits" => behaviour.waits = true,
                "slot-bytes" => behaviour.slot_bytes = Some(value),
                "serve" => {}
                _ => panic!("{name}"),
            }
        }
        behaviour
    }
}
