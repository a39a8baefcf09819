//! Where each field of a message stands, as the installed classes say.
//!
//! `SGLang`'s messages are arrays: a tag, then the fields in the order of their class. A release may put a field in the
//! middle, so no position is written down here: all come from the classes at the start.

use rmp::encode;

use crate::sglang_zmq::error::SglangFrontendError;
use crate::sglang_zmq::msgpack::{Items, Value, read_list};

/// A field of a class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageField {
    /// Its name.
    pub name: String,
    /// Its default, as msgpack; `None` where there is none.
    pub default: Option<Vec<u8>>,
}

/// A class of messages, its fields in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageClass {
    /// Its name, which is the tag of its messages.
    pub name: String,
    /// Its fields.
    pub fields: Vec<MessageField>,
}

/// Finds a class.
///
/// # Errors
/// [`SglangFrontendError::Class`].
pub(crate) fn find<'a>(
    classes: &'a [MessageClass],
    name: &'static str,
) -> Result<&'a MessageClass, SglangFrontendError> {
    let found = classes.iter().find(|class| class.name == name);
    found.ok_or(SglangFrontendError::Class { class: name })
}

impl MessageClass {
    /// Where a field stands among the fields.
    pub(crate) fn index_of(
        &self,
        class: &'static str,
        field: &'static str,
    ) -> Result<usize, SglangFrontendError> {
        let index = self.fields.iter().position(|known| known.name == field);
        index.ok_or(SglangFrontendError::Field { class, field })
    }
}

/// Indices of the fields of a class, by their names.
macro_rules! field_indices {
    ($(#[$doc:meta])* $name:ident of $class:literal { $($field:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        struct $name { $($field: usize),* }

        impl $name {
            fn new(
                classes: &[$crate::sglang_zmq::schema::MessageClass],
            ) -> Result<Self, $crate::sglang_zmq::error::SglangFrontendError> {
                let class = $crate::sglang_zmq::schema::find(classes, $class)?;
                Ok(Self { $($field: class.index_of($class, stringify!($field))?),* })
            }
        }
    };
}
pub(crate) use field_indices;

/// A message whose fields are read by index. Those that a shorter message leaves out are nil.
#[derive(Debug, Clone)]
pub(crate) struct Fields<'a>(Vec<Value<'a>>);

/// More fields than any class has; what comes after them is not looked at.
const MOST_FIELDS: usize = 256;

impl<'a> Fields<'a> {
    /// Of a message, as far as it is whole: its tag, and whether all of it could be read.
    pub(crate) fn of_message(bytes: &'a [u8]) -> Option<(&'a [u8], Self, bool)> {
        let (mut values, is_whole) = read_list(bytes, MOST_FIELDS)?;
        match values.first() {
            Some(&Value::Text(tag)) => {
                values.remove(0);
                Some((tag, Self(values), is_whole))
            }
            _ => None,
        }
    }

    /// Of an object inside a message, which has no tag.
    pub(crate) fn of_items(items: Items<'a>) -> Self {
        Self(items.take(MOST_FIELDS).collect())
    }

    pub(crate) fn get(&self, index: usize) -> Value<'a> {
        self.0.get(index).copied().unwrap_or(Value::Nil)
    }
}

/// A message of a class in which a few fields are set and all others have their defaults.
#[derive(Debug, Clone)]
pub(crate) struct Template {
    tag: String,
    fields: Vec<MessageField>,
}

impl Template {
    /// # Errors
    /// [`SglangFrontendError`] if the class is missing, lacks one of the fields that are `set`, or has another without a default.
    pub(crate) fn new(
        classes: &[MessageClass],
        name: &'static str,
        set: &[&'static str],
    ) -> Result<Self, SglangFrontendError> {
        let class = find(classes, name)?;
        for field in set {
            class.index_of(name, field)?;
        }
        let unknown = class
            .fields
            .iter()
            .find(|field| field.default.is_none() && !set.contains(&field.name.as_str()));
        match unknown {
            Some(field) => Err(SglangFrontendError::Unknown {
                class: name,
                field: field.name.clone(),
            }),
            None => Ok(Self {
                tag: name.to_owned(),
                fields: class.fields.clone(),
            }),
        }
    }

    /// The message; `write` returns false for a field that it does not set.
    pub(crate) fn encode(&self, mut write: impl FnMut(&str, &mut Vec<u8>) -> bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        array(&mut bytes, self.fields.len() + 1);
        text(&mut bytes, &self.tag);
        for field in &self.fields {
            if !write(&field.name, &mut bytes) {
                match &field.default {
                    Some(default) => bytes.extend_from_slice(default),
                    None => nil(&mut bytes),
                }
            }
        }
        bytes
    }
}

/// Writing to memory cannot fail.
const WRITTEN: &str = "a vector takes all bytes";

pub(crate) fn array(bytes: &mut Vec<u8>, len: usize) {
    encode::write_array_len(bytes, len as u32).expect(WRITTEN);
}

pub(crate) fn map(bytes: &mut Vec<u8>, len: usize) {
    encode::write_map_len(bytes, len as u32).expect(WRITTEN);
}

pub(crate) fn text(bytes: &mut Vec<u8>, text: &str) {
    encode::write_str(bytes, text).expect(WRITTEN);
}

pub(crate) fn nil(bytes: &mut Vec<u8>) {
    encode::write_nil(bytes).expect(WRITTEN);
}

pub(crate) fn uint(bytes: &mut Vec<u8>, value: u64) {
    encode::write_uint(bytes, value).expect(WRITTEN);
}

pub(crate) fn float(bytes: &mut Vec<u8>, value: f32) {
    encode::write_f32(bytes, value).expect(WRITTEN);
}

pub(crate) fn boolean(bytes: &mut Vec<u8>, value: bool) {
    encode::write_bool(bytes, value).expect(WRITTEN);
}

pub(crate) fn binary(bytes: &mut Vec<u8>, data: &[u8]) {
    encode::write_bin(bytes, data).expect(WRITTEN);
}

/// A text, or nothing.
pub(crate) fn optional_text(bytes: &mut Vec<u8>, value: Option<&str>) {
    match value {
        Some(value) => text(bytes, value),
        None => nil(bytes),
    }
}

/// What Python's `array("q")` becomes: the type's letter, then the numbers, little-endian.
pub(crate) fn tokens<'t>(bytes: &mut Vec<u8>, tokens: impl ExactSizeIterator<Item = &'t u32>) {
    array(bytes, 2);
    text(bytes, "q");
    encode::write_bin_len(bytes, (tokens.len() * 8) as u32).expect(WRITTEN);
    for &token in tokens {
        bytes.extend_from_slice(&u64::from(token).to_le_bytes());
    }
}
