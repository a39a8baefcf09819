//! `MessagePack`, read in index: no value is copied, and nested values are skipped by a loop, however deep they are.

use std::fmt;

use rmp::Marker;

/// A value of a message. Lists and maps are known by their extent, and read when they are looked into.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value<'a> {
    Nil,
    Flag(bool),
    Integer(i64),
    /// An integer above `i64::MAX`.
    Large(u64),
    Float(f64),
    /// A text, which need not be UTF-8.
    Text(&'a [u8]),
    Binary(&'a [u8]),
    /// Its type, and its bytes.
    Extension(i8, &'a [u8]),
    List(Items<'a>),
    /// Each entry is two items.
    Map(Items<'a>),
}

/// The items of a list, or of a map, which are known to be whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Items<'a> {
    bytes: &'a [u8],
    count: u64,
}

impl<'a> Items<'a> {
    /// How many there are. Those of a map count twice.
    pub(crate) const fn count(self) -> u64 {
        self.count
    }

    /// Those after the first.
    pub(crate) fn rest(mut self) -> Self {
        self.next();
        self
    }

    /// Two after two, as a map has them.
    pub(crate) fn pairs(mut self) -> impl Iterator<Item = (Value<'a>, Value<'a>)> {
        std::iter::from_fn(move || Some((self.next()?, self.next()?)))
    }
}

#[expect(
    clippy::copy_iterator,
    reason = "a value borrows its items and may be read again"
)]
impl<'a> Iterator for Items<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.count = self.count.checked_sub(1)?;
        read(&mut self.bytes)
    }
}

/// Reads a list as far as it is whole: its items, `most` of them at most, and whether all of them are there.
pub(crate) fn read_list(mut bytes: &[u8], most: usize) -> Option<(Vec<Value<'_>>, bool)> {
    let Head::List(count) = head(&mut bytes)? else {
        return None;
    };
    let mut items = Vec::new();
    for _ in 0..count.min(most as u64) {
        match read(&mut bytes) {
            Some(value) => items.push(value),
            None => return Some((items, false)),
        }
    }
    let rest = count.saturating_sub(most as u64);
    Some((items, skip(&mut bytes, rest).is_some()))
}

/// The one value that these bytes are; `None` where it is cut off, or more follows.
pub(crate) fn read_whole(mut bytes: &[u8]) -> Option<Value<'_>> {
    let value = read(&mut bytes)?;
    bytes.is_empty().then_some(value)
}

/// Reads a value, and what it holds. `None` where it is cut off, or there is no such value.
fn read<'a>(bytes: &mut &'a [u8]) -> Option<Value<'a>> {
    let items = |bytes: &mut &'a [u8], count: u64| {
        let start = *bytes;
        skip(bytes, count)?;
        let bytes = &start[..start.len() - bytes.len()];
        Some(Items { bytes, count })
    };
    Some(match head(bytes)? {
        Head::Value(value) => value,
        Head::List(count) => Value::List(items(bytes, count)?),
        Head::Map(count) => Value::Map(items(bytes, count)?),
    })
}

/// Skips so many values, and what they hold.
fn skip(bytes: &mut &[u8], mut values: u64) -> Option<()> {
    while values > 0 {
        values -= 1;
        if let Head::List(count) | Head::Map(count) = head(bytes)? {
            values = values.checked_add(count)?;
        }
    }
    Some(())
}

/// What a value begins with: all of one that holds no others, else how many it holds.
enum Head<'a> {
    Value(Value<'a>),
    List(u64),
    Map(u64),
}

fn head<'a>(bytes: &mut &'a [u8]) -> Option<Head<'a>> {
    let [marker] = array(bytes)?;
    let value = match Marker::from_u8(marker) {
        Marker::Null => Value::Nil,
        Marker::False => Value::Flag(false),
        Marker::True => Value::Flag(true),
        Marker::FixPos(value) => Value::Integer(value.into()),
        Marker::FixNeg(value) => Value::Integer(value.into()),
        Marker::U8 => Value::Integer(u8::from_be_bytes(array(bytes)?).into()),
        Marker::U16 => Value::Integer(u16::from_be_bytes(array(bytes)?).into()),
        Marker::U32 => Value::Integer(u32::from_be_bytes(array(bytes)?).into()),
        Marker::U64 => {
            let value = u64::from_be_bytes(array(bytes)?);
            i64::try_from(value).map_or(Value::Large(value), Value::Integer)
        }
        Marker::I8 => Value::Integer(i8::from_be_bytes(array(bytes)?).into()),
        Marker::I16 => Value::Integer(i16::from_be_bytes(array(bytes)?).into()),
        Marker::I32 => Value::Integer(i32::from_be_bytes(array(bytes)?).into()),
        Marker::I64 => Value::Integer(i64::from_be_bytes(array(bytes)?)),
        Marker::F32 => Value::Float(f32::from_be_bytes(array(bytes)?).into()),
        Marker::F64 => Value::Float(f64::from_be_bytes(array(bytes)?)),
        Marker::FixStr(length) => Value::Text(take(bytes, length.into())?),
        Marker::Str8 => Value::Text(sized::<1>(bytes)?),
        Marker::Str16 => Value::Text(sized::<2>(bytes)?),
        Marker::Str32 => Value::Text(sized::<4>(bytes)?),
        Marker::Bin8 => Value::Binary(sized::<1>(bytes)?),
        Marker::Bin16 => Value::Binary(sized::<2>(bytes)?),
        Marker::Bin32 => Value::Binary(sized::<4>(bytes)?),
        Marker::FixArray(count) => return Some(Head::List(count.into())),
        Marker::Array16 => return Some(Head::List(length::<2>(bytes)?)),
        Marker::Array32 => return Some(Head::List(length::<4>(bytes)?)),
        Marker::FixMap(count) => return Some(Head::Map(2 * u64::from(count))),
        Marker::Map16 => return Some(Head::Map(2 * length::<2>(bytes)?)),
        Marker::Map32 => return Some(Head::Map(2 * length::<4>(bytes)?)),
        Marker::FixExt1 => extension(bytes, 1)?,
        Marker::FixExt2 => extension(bytes, 2)?,
        Marker::FixExt4 => extension(bytes, 4)?,
        Marker::FixExt8 => extension(bytes, 8)?,
        Marker::FixExt16 => extension(bytes, 16)?,
        Marker::Ext8 => length::<1>(bytes).and_then(|length| extension(bytes, length))?,
        Marker::Ext16 => length::<2>(bytes).and_then(|length| extension(bytes, length))?,
        Marker::Ext32 => length::<4>(bytes).and_then(|length| extension(bytes, length))?,
        Marker::Reserved => return None,
    };
    Some(Head::Value(value))
}

fn array<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

/// A length in so many bytes.
fn length<const N: usize>(bytes: &mut &[u8]) -> Option<u64> {
    let digits: [u8; N] = array(bytes)?;
    Some(
        digits
            .iter()
            .fold(0, |length, &digit| length << 8 | u64::from(digit)),
    )
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Option<&'a [u8]> {
    let (first, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
    *bytes = rest;
    Some(first)
}

/// Bytes after their length.
fn sized<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = length::<N>(bytes)?;
    take(bytes, length)
}

/// A type, and so many bytes.
fn extension<'a>(bytes: &mut &'a [u8], length: u64) -> Option<Value<'a>> {
    let kind = i8::from_be_bytes(array(bytes)?);
    Some(Value::Extension(kind, take(bytes, length)?))
}

/// What a client is shown of a value: the beginning of a text, and of what is larger only its size.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => f.write_str("null"),
            Self::Flag(value) => value.fmt(f),
            Self::Integer(value) => value.fmt(f),
            Self::Large(value) => value.fmt(f),
            Self::Float(value) => value.fmt(f),
            Self::Text(bytes) => {
                let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * SHOWN)]);
                let text: String = text.chars().take(SHOWN).collect();
                write!(f, "{text:?}")
            }
            Self::Binary(bytes) => write!(f, "{} bytes", bytes.len()),
            Self::Extension(kind, bytes) => {
                write!(f, "{} bytes of extension type {kind}", bytes.len())
            }
            Self::List(items) => write!(f, "a list of {}", items.count),
            Self::Map(items) => write!(f, "a map of {}", items.count / 2),
        }
    }
}

/// Characters of a text that are shown.
const SHOWN: usize = 60;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rmpv::Value as Tree;

    use super::*;

    fn any_tree() -> impl Strategy<Value = Tree> {
        let leaf = prop_oneof![
            Just(Tree::Nil),
            any::<bool>().prop_map(Tree::from),
            any::<i64>().prop_map(Tree::from),
            any::<u64>().prop_map(Tree::from),
            any::<f32>().prop_map(Tree::from),
            any::<f64>().prop_map(Tree::from),
            ".{0,70}".prop_map(Tree::from),
            prop::collection::vec(any::<u8>(), 0..300).prop_map(Tree::Binary),
            (any::<i8>(), prop::collection::vec(any::<u8>(), 0..20))
                .prop_map(|(kind, bytes)| Tree::Ext(kind, bytes)),
        ];
        leaf.prop_recursive(4, 60, 20, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..20).prop_map(Tree::Array),
                prop::collection::vec((inner.clone(), inner), 0..20).prop_map(Tree::Map),
            ]
        })
    }

    fn agrees(value: Value<'_>, tree: &Tree) -> bool {
        match (value, tree) {
            (Value::Nil, Tree::Nil) => true,
            (Value::Extension(kind, bytes), Tree::Ext(other, others)) => {
                kind == *other && bytes == others
            }
            (Value::Flag(value), Tree::Boolean(other)) => value == *other,
            (Value::Integer(value), Tree::Integer(other)) => other.as_i64() == Some(value),
            (Value::Large(value), Tree::Integer(other)) => other.as_u64() == Some(value),
            (Value::Float(value), Tree::F32(other)) => {
                value.to_bits() == f64::from(*other).to_bits()
            }
            (Value::Float(value), Tree::F64(other)) => value.to_bits() == other.to_bits(),
            (Value::Text(value), Tree::String(other)) => value == other.as_bytes(),
            (Value::Binary(value), Tree::Binary(other)) => value == other,
            (Value::List(items), Tree::Array(others)) => {
                items.count() == others.len() as u64
                    && items.zip(others).all(|(value, other)| agrees(value, other))
            }
            (Value::Map(items), Tree::Map(others)) => {
                let same =
                    |((key, value), (key2, value2)): ((Value<'_>, Value<'_>), &(Tree, Tree))| {
                        agrees(key, key2) && agrees(value, value2)
                    };
                items.count() == 2 * others.len() as u64 && items.pairs().zip(others).all(same)
            }
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn reads_what_was_written(tree in any_tree(), cut in any::<prop::sample::Index>()) {
            let mut bytes = Vec::new();
            rmpv::encode::write_value(&mut bytes, &tree).unwrap();
            let mut rest = &bytes[..];
            prop_assert!(agrees(read(&mut rest).unwrap(), &tree));
            prop_assert!(rest.is_empty());
            let cut = cut.index(bytes.len());
            prop_assert_eq!(read(&mut &bytes[..cut]), None);
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let mut rest = &bytes[..];
            if let Some(value) = read(&mut rest) {
                let _ = value.to_string();
            }
            let _ = read_list(&bytes, 8);
        }
    }

    #[test]
    fn depth_costs_no_stack() {
        let deep = [vec![0x91; 10_000_000], vec![0xc0]].concat();
        let Some(Value::List(items)) = read(&mut &deep[..]) else {
            panic!("a list")
        };
        assert_eq!(items.count(), 1);
        let maps = [&[0x81, 0xc0].repeat(1_000_000)[..], &[0xc0]].concat();
        assert!(matches!(read(&mut &maps[..]), Some(Value::Map(_))));
    }

    #[test]
    fn a_length_is_believed_when_the_items_are_there() {
        // 2³² - 1 lists of as many.
        let hollow = [0xdd, 0xff, 0xff, 0xff, 0xff].repeat(3);
        assert_eq!(read(&mut &hollow[..]), None);
        assert_eq!(read_list(&hollow, 4), Some((Vec::new(), false)));
        assert_eq!(read_list(&[0x93, 1, 2], 4).unwrap().0.len(), 2);
        assert!(read_list(&[0x93, 1, 2, 3], 1).unwrap().1);
    }
}
